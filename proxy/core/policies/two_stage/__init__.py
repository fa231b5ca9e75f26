"""The two-stage rule that BR-0 and BR-H share.

| module | job |
| --- | --- |
| `policy` | one call per round; the discount that follows the turnover |
| `round` | what the stages share |
| `only_rank` | one rank has free slots, and room for all: nothing is chosen |
| `stage_1` | slots abound: only the rank of each request is chosen |
| `affinity` | what it is worth that a rank need not pull a prompt |
| `roomiest` | the rank with most room, found without a look at the others |
| `hold` | a moment's wait for room, while slots abound |
| `stage_2` | slots are scarce: each rank chooses its requests |
| `target` | the load at which the ranks would be evenly full |
| `subsets` | the best subset of the candidates, else the best single one |
| `reservation` | ranks that make room for a large request that is late |
| `paper` | the paper's stages, where ours differ |

docs/scheduling.md explains the rule, and gives the reason of each difference from the paper.
"""

from balanceroute.proxy.core.policies.two_stage.policy import TwoStage, ignore_stage
from balanceroute.proxy.core.policies.two_stage.settings import TwoStageSettings

__all__ = ["TwoStage", "TwoStageSettings", "ignore_stage"]
