"""`python -m balanceroute`: the command line."""

import sys

from balanceroute.proxy.__main__ import main

sys.exit(main())
