#!/bin/bash
# Starts a server by the command given, waits until it answers a question over HTTP, and stops it.
# Ends with 1 where it doesn't. Bash 3.2, curl and sed are enough.
#
#   MLX_SERVER_PORT=8000 .github/first_answer.sh make serve
#
# SECONDS_TO_START: how long it may take, an installation included [1200].
set -euo pipefail
export MLX_SERVER_PORT="${MLX_SERVER_PORT:-8000}"
url="http://127.0.0.1:$MLX_SERVER_PORT"
limit="${SECONDS_TO_START:-1200}"
log=$(mktemp)

# A process group of its own, so that make and the server both end.
set -m
"$@" >"$log" 2>&1 </dev/null &
server=$!
set +m
finish() {
    kill -TERM -- "-$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
    cat "$log"
    rm -f "$log"
}
trap finish EXIT

SECONDS=0
until curl --silent --fail --output /dev/null "$url/health"; do
    if ! kill -0 "$server" 2>/dev/null || [ "$SECONDS" -ge "$limit" ]; then
        echo "first_answer: no server answered within $SECONDS s" >&2
        exit 1
    fi
    sleep 1
done
echo "first_answer: the server was there after $SECONDS s"
answer=$(curl --silent --show-error --fail --max-time 120 "$url/v1/chat/completions" \
    --header 'Content-Type: application/json' \
    --data '{"messages": [{"role": "user", "content": "How do I change the port?"}], "max_tokens": 64, "temperature": 0}')
echo "$answer"
case "$answer" in
    *port*) ;;
    *)
        echo "first_answer: that is no answer" >&2
        exit 1
        ;;
esac
