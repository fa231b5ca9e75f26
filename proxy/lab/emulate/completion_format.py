"""Answers of /v1/completions."""

from collections.abc import Sequence

from balanceroute.proxy.lab.emulate.answer import (
    AnswerFormat,
    PlainEvent,
    as_bytes,
    as_json,
    continuous_usage,
    ending,
    plain_event,
    quoted,
    token_ids_json,
    whole_usage,
)
from balanceroute.proxy.lab.emulate.choice import Choice, Delta
from balanceroute.proxy.lab.emulate.request import Prompt
from balanceroute.proxy.lab.emulate.sampler import TokenLogprob, prompt_logprobs
from balanceroute.proxy.lab.emulate.tokens import TOKEN_TEXTS


class CompletionFormat(AnswerFormat):
    """Writes the answer of a completion request."""

    kind = "text_completion"

    def plain(self, choice: Choice) -> PlainEvent | None:
        """Return a writer of plain tokens' events."""
        request = self._request
        if request.return_token_ids or request.echo:
            return None
        before = f'{self._chunk}{{"index":{choice.index},"text":"'
        behind = (
            '","logprobs":null,"finish_reason":null,"stop_reason":null,'
            '"prompt_token_ids":null,"token_ids":null}]'
        )
        return plain_event(request, choice, before, behind)

    def event(self, choice: Choice, delta: Delta) -> bytes:
        """Return the event of a token."""
        request = self._request
        # Not in the event of a choice that is handed back behind its first token.
        first = 0 < len(delta.token_ids) == choice.emitted
        echo = request.echo and first
        text = self._echoed(choice.prompt) + delta.text if echo else delta.text
        echoed = choice.prompt if echo else None
        logprobs = self._logprobs(delta.logprobs, offset=delta.offset, echo=echoed)
        reason = "null" if choice.finish_reason is None else f'"{choice.finish_reason}"'
        prompt_ids = as_json(choice.prompt.tokens) if request.return_token_ids and first else "null"
        return as_bytes(
            f'{self._chunk}{{"index":{choice.index},"text":{quoted(text)},"logprobs":{logprobs},'
            f'"finish_reason":{reason},"stop_reason":{as_json(choice.stop_reason)},'
            f'"prompt_token_ids":{prompt_ids},"token_ids":{token_ids_json(request, delta.token_ids)}}}]'
            f"{continuous_usage(request, choice)}{ending(request, choice, self._head)}}}\n\n"
        )

    def whole(self, choices: Sequence[Choice], kv_transfer_params: object) -> bytes:
        """Return the body of an answer that is not streamed."""
        head = self._head
        usage = whole_usage(self._request, choices, cached=head.report_cached)
        return as_bytes(
            f'{head.opening("text_completion")},"choices":[{",".join(map(self._choice, choices))}],'
            f'"service_tier":null,"system_fingerprint":{quoted(head.fingerprint)},"usage":{usage},'
            f'"kv_transfer_params":{as_json(kv_transfer_params)},"ec_transfer_params":null,'
            '"metrics":null}'
        )

    def _choice(self, choice: Choice) -> str:
        request, prompt = self._request, choice.prompt
        text = self._echoed(prompt) + choice.said if request.echo else choice.said
        listed = None
        if request.prompt_logprobs is not None:
            listed = prompt_logprobs(prompt.tokens, prompt.words, max(1, request.prompt_logprobs))
        logprobs = self._logprobs(choice.logprobs, offset=0, echo=prompt if request.echo else None)
        prompt_ids = as_json(prompt.tokens) if request.return_token_ids else "null"
        return (
            f'{{"index":{choice.index},"text":{quoted(text)},"logprobs":{logprobs},'
            f'"finish_reason":"{choice.finish_reason}",'
            f'"stop_reason":{as_json(choice.stop_reason)},'
            f'"token_ids":{token_ids_json(request, choice.token_ids)},'
            f'"prompt_logprobs":{as_json(listed)},"prompt_token_ids":{prompt_ids},'
            '"routed_experts":null}'
        )

    def _echoed(self, prompt: Prompt) -> str:
        return "" if self._request.return_token_ids else prompt.said

    def _logprobs(self, said: Sequence[TokenLogprob], *, offset: int, echo: Prompt | None) -> str:
        """Return the log-probabilities of tokens, with an echoed prompt's before them."""
        request = self._request
        if not request.logprobs:
            return "null"
        tokens: list[str] = []
        logprobs: list[float | None] = []
        top: list[dict[str, float] | None] = []
        if echo is not None:
            tokens = echo.words
            logprobs = [None] * len(tokens)
            top = [None] * len(tokens)
            for i, entry in enumerate(prompt_logprobs(echo.tokens, tokens, request.logprobs)):
                if isinstance(entry, dict):
                    top[i] = {o["decoded_token"]: o["logprob"] for o in entry.values()}
                    logprobs[i] = entry[str(echo.tokens[i])]["logprob"]
        for logprob in said:
            tokens.append(logprob.token)
            logprobs.append(logprob.logprob)
            top.append(
                {logprob.token: logprob.logprob} | {TOKEN_TEXTS[i]: p for i, p in logprob.others}
            )
        offsets: list[int] = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return (
            f'{{"text_offset":{as_json(offsets)},"token_logprobs":{as_json(logprobs)},'
            f'"tokens":{as_json(tokens)},"top_logprobs":{as_json(top)}}}'
        )
