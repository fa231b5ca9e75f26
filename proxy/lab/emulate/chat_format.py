"""Answers of /v1/chat/completions."""

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
from balanceroute.proxy.lab.emulate.sampler import TokenLogprob, prompt_logprobs
from balanceroute.proxy.lab.emulate.tokens import TOKEN_TEXTS
from balanceroute.proxy.lab.emulate.tool_script import Channel, ToolScript


class ChatFormat(AnswerFormat):
    """Writes the answer of a chat request."""

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
        """Return a writer of plain tokens' events."""
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
        """Return the body of an answer that is not streamed."""
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
        candidates += [(TOKEN_TEXTS[token], logprob) for token, logprob in said.others]
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
