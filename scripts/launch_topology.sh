#!/usr/bin/env bash
# Run all processes of one host of a topology, until one of them ends or this script is told to.
#
#   scripts/launch_topology.sh [--print] [--role prefill|decode|proxy] [--logs FOLDER] TOPOLOGY HOST
#
# TOPOLOGY is a file or the name of a shipped one; HOST is a host as the file names it. --print shows
# the commands and runs none. Each process appends to FOLDER/NAME.log (default: ./logs). What ends first
# ends the rest, and its status is this script's: one rank alone would make the others wait for ever.
set -euo pipefail

usage() {
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

print='' logs=logs role=()
while [[ ${1-} == -* ]]; do
    case $1 in
        --print) print=yes ;;
        --role) role=(--role "${2-}") && shift ;;
        --logs) logs=${2-} && shift ;;
        *) usage ;;
    esac
    shift || usage
done
[[ $# -eq 2 && -n $logs ]] || usage
topology=$1 host=$2
balanceroute=${BALANCEROUTE:-balanceroute}

if [[ -n $print ]]; then
    exec "$balanceroute" topology commands "$topology" --host "$host" "${role[@]}"
fi

# Not in a process substitution, whose status would be lost.
lines=$("$balanceroute" topology commands "$topology" --host "$host" "${role[@]}" --lines)
[[ -n $lines ]] || { echo "$0: nothing runs on $host in that role" >&2; exit 2; }
mkdir -p "$logs"

pids=()
stop() {
    trap '' INT TERM
    ((${#pids[@]})) && kill -TERM "${pids[@]}" 2>/dev/null || true
    wait
}
trap 'stop; exit 143' TERM
trap 'stop; exit 130' INT

while IFS=$'\t' read -r name command; do
    echo "$name: $logs/$name.log"
    # exec, so that the signal reaches the engine and not a shell around it. Appended: a supervisor that
    # starts this again must not erase why it ended.
    bash -c "exec $command" >>"$logs/$name.log" 2>&1 </dev/null &
    pids+=($!)
done <<<"$lines"

status=0
wait -n "${pids[@]}" || status=$?
echo "$0: a process ended with status $status: ending the others" >&2
stop
exit "$status"
