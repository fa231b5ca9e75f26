"""Which of several replicas leads: one decides about a decode group, all other ones follow it.

Off unless `--leader-lease` or `--leader-lock` says where they agree; imported only then.
"""
