"""Answers of chat, completions and generate as vLLM writes them."""

from collections.abc import Sequence

from balanceroute.proxy.lab.emulate.answer import (
    AnswerFormat,
    AnswerHead,
    Channel,
    Choice,
    Delta,
    PlainEvent,
    ToolScript,
    as_bytes,
    as_json,
    continuous_usage,
    ending,
    final_usage,
    plain_event,
    quoted,
    token_ids_json,
    whole_usage,
)
from balanceroute.proxy.lab.emulate.request import GenerationRequest, Prompt, TokenOutput
from balanceroute.proxy.lab.emulate.tokens import TOKEN_TEXTS, TokenLogprob, prompt_logprobs


class ChatFormat(AnswerFormat):
    kind = "chat.completion.chunk"

    def opening(self, choice: Choice) -> bytes:
        """Return the event that names the role."""
        request = self._request
        ids = as_json(choice.prompt.tokens) if request.return_token_ids else "null"
        return as_bytes(
            f'{self._chunk}{{"index":{choice.index},"delta":{{"role":"assistant","content":""}},'
            f'"logprobs":null,"finish_reason":null}}]{continuous_usage(request, choice)},'
            f'"prompt_token_ids":{ids},"prompt_text":null}}\n\n'
        )

    def plain(self, choice: Choice) -> PlainEvent | None:
        request = self._request
        if request.return_token_ids:
            return None
        before = f'{self._chunk}{{"index":{choice.index},"delta":{{"content":"'
        behind = '"},"logprobs":null,"finish_reason":null,"token_ids":null}]'
        return plain_event(request, choice, before, behind)

    def event(self, choice: Choice, delta: Delta) -> bytes:
        """Return the event of a token; empty if no field of it would have a value."""
        request = self._request
        ended = choice.finish_reason is not None
        if not (delta.text or ended or delta.logprobs or request.return_token_ids):
            return b""
        logprobs = self._logprobs(delta.logprobs)
        reasons = '"finish_reason":null'
        if ended:
            reasons = (
                f'"finish_reason":"{_finish(choice)}","stop_reason":{as_json(choice.stop_reason)}'
            )
        return as_bytes(
            f'{self._chunk}{{"index":{choice.index},"delta":{_delta(choice, delta)},'
            f'"logprobs":{logprobs},{reasons},"token_ids":{token_ids_json(request, delta.token_ids)}}}]'
            f"{continuous_usage(request, choice)}{ending(request, choice, self._head)}}}\n\n"
        )

    def whole(self, choices: Sequence[Choice], kv_transfer_params: object) -> bytes:
        request, head = self._request, self._head
        usage = whole_usage(request, choices, cached=head.report_cached)
        prompt = request.prompts[0]
        listed = None
        if request.prompt_logprobs is not None:
            listed = prompt_logprobs(prompt.tokens, prompt.words, max(1, request.prompt_logprobs))
        ids = as_json(prompt.tokens) if request.return_token_ids else "null"
        return as_bytes(
            f'{head.opening("chat.completion")},"choices":[{",".join(map(self._choice, choices))}],'
            f'"service_tier":null,"system_fingerprint":{quoted(head.fingerprint)},"usage":{usage},'
            f'"prompt_logprobs":{as_json(listed)},"prompt_token_ids":{ids},"prompt_text":null,'
            f'"kv_transfer_params":{as_json(kv_transfer_params)},"ec_transfer_params":null,'
            '"metrics":null}'
        )

    def _choice(self, choice: Choice) -> str:
        script = choice.script
        calls = script is not None and choice.calls_tool
        reasoning = quoted(choice.reasoning) if choice.reasoning else "null"
        said = choice.said
        content = "null" if calls or (choice.reasoning and not said) else quoted(said)
        tool_calls = (
            f'"tool_calls":[{_whole_call(script)}],' if script is not None and calls else ""
        )
        return (
            f'{{"index":{choice.index},"message":{{"role":"assistant","content":{content},'
            f'"refusal":null,"annotations":null,"audio":null,"function_call":null,{tool_calls}'
            f'"reasoning":{reasoning}}},"logprobs":{self._logprobs(choice.logprobs)},'
            f'"finish_reason":"{_finish(choice)}","stop_reason":{as_json(choice.stop_reason)},'
            f'"token_ids":{token_ids_json(self._request, choice.token_ids)},"routed_experts":null}}'
        )

    def _logprobs(self, said: Sequence[TokenLogprob]) -> str:
        if not said:
            return "null"
        entries = ",".join(self._logprob(entry) for entry in said)
        return f'{{"content":[{entries}]}}'

    def _logprob(self, said: TokenLogprob) -> str:
        candidates = [(said.token, said.logprob)]
        candidates += [(TOKEN_TEXTS[token], logprob) for token, logprob in said.alternatives]
        listed = candidates[: self._request.top_logprobs]
        top = ",".join(f"{{{_candidate(*pair)}}}" for pair in listed)
        return f'{{{_candidate(*candidates[0])},"top_logprobs":[{top}]}}'


def _candidate(token: str, logprob: float) -> str:
    spelled = as_json(list(token.encode()))
    return f'"token":{quoted(token)},"logprob":{as_json(logprob)},"bytes":{spelled}'


def _delta(choice: Choice, delta: Delta) -> str:
    if not delta.text:
        return "{}"
    script = choice.script
    if delta.channel is Channel.NAME and script is not None:
        call = (
            f'{{"id":"{script.call_id}","type":"function","index":0,'
            f'"function":{{"name":{quoted(script.name)}}}}}'
        )
        return f'{{"content":null,"tool_calls":[{call}]}}'
    if delta.channel is Channel.ARGUMENTS:
        call = f'{{"index":0,"function":{{"arguments":{quoted(delta.text)}}}}}'
        return f'{{"content":null,"tool_calls":[{call}]}}'
    key = "reasoning" if delta.channel is Channel.REASONING else "content"
    return f'{{"{key}":{quoted(delta.text)}}}'


def _finish(choice: Choice) -> str:
    # OpenAI: "tool_calls" if the model chose to call, "stop" if the request named the function.
    if choice.calls_tool and choice.finish_reason == "stop" and choice.stop_reason is None:
        return "stop" if choice.request.tool_choice == "named" else "tool_calls"
    return choice.finish_reason or "stop"


def _whole_call(script: ToolScript) -> str:
    function = f'{{"name":{quoted(script.name)},"arguments":{quoted(script.arguments)}}}'
    return f'{{"id":"{script.call_id}","type":"function","function":{function}}}'


class CompletionFormat(AnswerFormat):
    kind = "text_completion"

    def plain(self, choice: Choice) -> PlainEvent | None:
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
                {logprob.token: logprob.logprob}
                | {TOKEN_TEXTS[i]: p for i, p in logprob.alternatives}
            )
        offsets: list[int] = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return (
            f'{{"text_offset":{as_json(offsets)},"token_logprobs":{as_json(logprobs)},'
            f'"tokens":{as_json(tokens)},"top_logprobs":{as_json(top)}}}'
        )


# Answers of /inference/v1/generate: token ids, and text where it is asked for.
#
# Its events name every member of its choices, as vLLM 0.32 does not leave out what is null there.


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
        usage = final_usage(self._request, choices, cached=self._head.report_cached)
        return as_bytes(f'{self._chunk}{usage},"output_mode":"{self._mode}","choices":[]}}\n\n')

    def whole(self, choices: Sequence[Choice], kv_transfer_params: object) -> bytes:
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
        self, choice: Choice, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
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
            top = [(token, one.logprob), *one.alternatives]
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
