"""What became of one client's request where there are several groups, and whether that may be."""

from collections.abc import Mapping

from balanceroute.proxy.testing.chaos.answer_reader import Ending, Received
from balanceroute.proxy.testing.chaos.clients import Client
from balanceroute.proxy.testing.chaos.group_plan import GroupPlan, named
from balanceroute.proxy.testing.chaos.judge import Judge, Verdict, refusal_is_wrong
from balanceroute.proxy.testing.chaos.requests import ClientRequest


class GroupJudge:
    """Has each answer compared by the judge of the group that gave it; see `Judge`.

    Args:
        plan: What was to happen.
        judges: Those of the groups, by name.
    """

    def __init__(self, plan: GroupPlan, judges: Mapping[str, Judge]) -> None:
        self._plan = plan
        self._judges = judges
        self.tenants = plan.whole.tenants
        self.merges = any(one.merges for one in judges.values())

    def may_draw_seed(self, request: ClientRequest) -> bool:
        """Return whether the proxy may have drawn a seed for a request."""
        return any(one.may_draw_seed(request) for one in self._judges.values())

    async def judge(
        self,
        client: Client,
        request: ClientRequest,
        received: Received,
        *,
        reworded: bool,
        seed: int | None,
    ) -> Verdict:
        """Return what became of one request; see `Judge.judge`."""
        names = self._plan.may_answer(request)
        if not names and received.status:
            return self._judge_unknown(client, request, received)
        said = received.header(b"x-balanceroute-model").decode()
        if received.status == 200 and self._plan.is_of_alias(request):
            # Comments that come while another group may still answer begin a stream without a name.
            if said or not received.body.startswith(b":"):
                if said not in names:
                    return Verdict("wrong", [f"it was answered by {said!r}, which may not"])
                names = [said]
        elif said and not self._plan.is_of_alias(request):
            return Verdict("wrong", [f"it named its model, and {said!r} was chosen"])
        verdicts = [
            await self._judges[name].judge(
                client,
                named(request, name) if "model" in request.values else request,
                received,
                reworded=reworded,
                seed=seed,
            )
            for name in names or self._judges
        ]
        verdict = next((one for one in verdicts if not one.wrong), verdicts[0])
        # Until it is there again nobody knows its name.
        if received.status == 404 and not self._plan.leaving.isdisjoint(names):
            verdict.wrong = [] if client.left else refusal_is_wrong(request, received)
        return verdict

    def _judge_unknown(self, client: Client, request: ClientRequest, received: Received) -> Verdict:
        """Judge the answer to a request that names no group."""
        verdict = Verdict(f"status {received.status}", [])
        if received.status == 200:
            verdict.wrong.append("it was served, and names no group")
            return verdict
        if not client.left:
            cut = received.ending is not Ending.COMPLETE and not client.visit.pauses
            verdict.wrong += ["its refusal is cut"] if cut else refusal_is_wrong(request, received)
        explained = None if self.tenants is None else self.tenants.wrongs(request, received)
        if explained is not None:
            verdict.wrong += explained
        elif received.status not in (400, 404):
            verdict.wrong.append(f"it got {received.status}, and names no group")
        return verdict
