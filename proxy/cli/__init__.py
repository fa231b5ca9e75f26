"""The subcommands of `balanceroute`, one file each."""
