#!/usr/bin/env bash
# One run on two machines that are network namespaces of this one: each has a loopback and an address of its own, and
# nothing of the other is reached but over the wire between them.
#
#     tests/launcher/namespaces.sh [OPTION=VALUE ...]
#
# Needs root and `ip` (Debian: apt-get install iproute2). The namespaces are gone afterwards.
set -euo pipefail
[ "$(id -u)" = 0 ] || { echo "network namespaces need root" >&2; exit 2; }
command -v ip >/dev/null || { echo "ip is not there: apt-get install iproute2" >&2; exit 2; }
here=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
one=glmexp-$$-0
two=glmexp-$$-1
finish() {
    ip netns del "$one" 2>/dev/null || true
    ip netns del "$two" 2>/dev/null || true
    rm -rf "$work"
}
trap finish EXIT
ip netns add "$one"
ip netns add "$two"
ip link add wire0 netns "$one" type veth peer name wire1 netns "$two"
for node in 0 1; do
    space=glmexp-$$-$node
    ip -n "$space" addr add "10.77.0.$((node + 1))/24" dev "wire$node"
    ip -n "$space" link set lo up
    ip -n "$space" link set "wire$node" up
done
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
cd "$work"
node() {
    ip netns exec "glmexp-$$-$1" python -m glmexp train.max_steps=2 eval=none tracker=none precision=fp32 \
        launcher.nnodes=2 launcher.nproc=1 "launcher.node_rank=$1" launcher.master_addr=10.77.0.1 \
        "launcher.env.GLOO_SOCKET_IFNAME=wire$1" "${@:2}"
}
node 1 "$@" &
second=$!
code=0
node 0 "$@" || code=$?
wait "$second" || code=$?
echo "exit code $code"
exit "$code"
