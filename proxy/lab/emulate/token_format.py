"""Answers of /inference/v1/generate: token ids, and text where it is asked for.

Its events name every member of its choices, as vLLM 0.32 does not leave out what is null there.
"""

from collections.abc import Sequence

from balanceroute.proxy.lab.emulate.answer import (
    AnswerFormat,
    AnswerHead,
    PlainEvent,
    as_bytes,
    as_json,
    final_usage,
    quoted,
    whole_usage,
)
from balanceroute.proxy.lab.emulate.choice import Choice, Delta
from balanceroute.proxy.lab.emulate.request import GenerationRequest, TokenOutput
from balanceroute.proxy.lab.emulate.sampler import TokenLogprob
from balanceroute.proxy.lab.emulate.tokens import TOKEN_TEXTS


class TokenFormat(AnswerFormat):
    """Writes the answer of a request of token ids."""

    def __init__(self, request: GenerationRequest, head: AnswerHead, output: TokenOutput) -> None:
        super().__init__(request, head)
        self._output = output
        self._mode = "text" if output.text else "tokens"
        self._chunk = f'data: {{"request_id":{quoted(head.id)},"usage":'

    def plain(self, choice: Choice) -> PlainEvent | None:
        """Return None: every event has ids."""
        del choice
        return None

    def event(self, choice: Choice, delta: Delta) -> bytes:
        """Return the event of a token; empty if it has neither ids, nor text, nor an end."""
        ended = choice.finish_reason is not None
        if not (delta.token_ids or ended or (self._output.text and delta.text)):
            return b""
        once = ""
        if self._output.prompt_ids and 0 < len(delta.token_ids) == choice.emitted:
            once = f',"prompt_token_ids":{as_json(choice.prompt.tokens)}'
        said = self._members(choice, delta.text, delta.token_ids, delta.logprobs)
        usage = self._usage(choice) if self._request.continuous_usage else "null"
        return as_bytes(
            f'{self._chunk}{usage}{once},"output_mode":"{self._mode}","choices":[{said}]}}\n\n'
        )

    def usage_event(self, choices: Sequence[Choice]) -> bytes:
        """Return the event with the usage at the end of a stream."""
        usage = final_usage(self._request, choices, cached=self._head.report_cached)
        return as_bytes(f'{self._chunk}{usage},"output_mode":"{self._mode}","choices":[]}}\n\n')

    def whole(self, choices: Sequence[Choice], kv_transfer_params: object) -> bytes:
        """Return the body of an answer that is not streamed."""
        head = self._head
        usage = whole_usage(self._request, choices, cached=head.report_cached)
        shows = self._output.prompt_ids
        ids = as_json(self._request.prompts[0].tokens) if shows else "null"
        said = ",".join(
            self._members(choice, choice.said, choice.token_ids, choice.logprobs)
            for choice in choices
        )
        return as_bytes(
            f'{{"request_id":{quoted(head.id)},"model":{quoted(head.model)},"created":{head.created},'
            f'"usage":{usage},"prompt_logprobs":null,"prompt_token_id_logprobs":null,'
            f'"prompt_token_ids":{ids},"mm_placeholders":null,"metrics":null,'
            f'"kv_transfer_params":{as_json(kv_transfer_params)},"ec_transfer_params":null,'
            f'"output_mode":"{self._mode}","choices":[{said}]}}'
        )

    def _members(
        self,
        choice: Choice,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob],
    ) -> str:
        reason = "null" if choice.finish_reason is None else f'"{choice.finish_reason}"'
        said = f'"text":{quoted(text)},' if self._output.text else ""
        versions = "null"
        if choice.finish_reason is not None:
            versions = f'[{{"version":"default","start":0,"end":{len(choice.token_ids)}}}]'
        return (
            f'{{"index":{choice.index},"finish_reason":{reason},'
            f'"stop_reason":{as_json(choice.stop_reason)},"token_ids":{as_json(list(token_ids))},'
            f'"routed_experts":null,"sampling_mask":null,"weight_versions":{versions},{said}'
            f'"logprobs":{self._logprobs(token_ids, logprobs)}}}'
        )

    def _logprobs(self, token_ids: Sequence[int], said: Sequence[TokenLogprob]) -> str:
        if not self._request.logprobs:
            return "null"
        content = []
        for token, one in zip(token_ids, said, strict=False):
            top = [(token, one.logprob), *one.others]
            if self._output.text:
                entry = _worded(one.token, one.logprob)
                listed = [_worded(one.token if i == token else TOKEN_TEXTS[i], p) for i, p in top]
            else:
                entry = {"token_id": token, "logprob": one.logprob, "rank": 1}
                listed = [
                    {"token_id": i, "logprob": p, "rank": rank}
                    for rank, (i, p) in enumerate(top, 1)
                ]
            content.append({**entry, "top_logprobs": listed})
        return as_json({"content": content})

    def _usage(self, choice: Choice) -> str:
        prompt, said = len(choice.prompt.tokens), choice.emitted
        return (
            f'{{"prompt_tokens":{prompt},"total_tokens":{prompt + said},"completion_tokens":{said},'
            '"prompt_tokens_details":null,"completion_tokens_details":null}'
        )


def _worded(token: str, logprob: float) -> dict[str, object]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode("utf-8", "replace"))}
