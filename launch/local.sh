#!/usr/bin/env bash
# Several processes of one run on this machine, over loopback.
#
#   launch/local.sh [options] -- --config=FILE [options of jaxcl.main]
#
#   --processes=N  how many; 2
#   --gpus=N       GPUs of each process: the first has 0 to N-1, the second the next
#                  ones; on CPU leave it out
#   --retries=N    starts after a failure; 0
#   --port=N       of process 0; a free one
#   --dry-run      print the commands
#   --help
#
# Exit code: that of python -m jaxcl.main, which is 0 if all processes finished, 75 if
# they stopped and saved (the same command continues), and else that of the first which
# failed. Then the others are killed: they would wait for it. SIGTERM, SIGINT or SIGHUP
# stop all and save; a second one kills. PYTHON names another python than "python".
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

processes=2 gpus='' retries=0 port='' python=${PYTHON:-python}
while (($#)); do
  case $1 in
    --processes=*) processes=${1#*=} && count --processes "$processes" 1 ;;
    --gpus=*) gpus=${1#*=} && count --gpus "$gpus" 1 ;;
    --retries=*) retries=${1#*=} && count --retries "$retries" ;;
    --port=*) port=${1#*=} && count --port "$port" 1 ;;
    --dry-run) dry=1 ;;
    --help) usage && exit ;;
    --) shift && break ;;
    *) refuse "unknown option $1; options of jaxcl.main stand after --" ;;
  esac
  shift
done
(($#)) || refuse "nothing to run: -- and the options of jaxcl.main are missing"
check_config "$@"

stopping='' pids=()

# SIGNAL, to the processes that are left. Those that decode for them share their
# group: they must outlive a SIGTERM and not a SIGKILL.
signal() {
  local pid
  for pid in ${pids[@]+"${pids[@]}"}; do
    kill -s "$1" "$pid" 2>/dev/null || true
    if [[ $1 == KILL ]]; then kill -s KILL -- "-$pid" 2>/dev/null || true; fi
  done
}

stop() {
  if [[ -n $stopping ]]; then signal KILL; else signal TERM; fi
  stopping=1
}

free_port() {
  "$python" -c 'import socket
with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    print(s.getsockname()[1])'
}

# Start all processes; their numbers go to pids.
start() {
  local i first at settings command
  at=${port:-$(free_port)}
  pids=() code=0
  for ((i = 0; i < processes; i++)); do
    settings=("JAX_COORDINATOR_BIND_ADDRESS=127.0.0.1:$at")
    if [[ -n $gpus ]]; then
      first=$((i * gpus))
      settings+=("JAX_LOCAL_DEVICE_IDS=$(seq -s, "$first" $((first + gpus - 1)))")
    fi
    # A session of its own, or Ctrl-C would reach it without us.
    command=(setsid env "${settings[@]}" "$python" -m jaxcl.main "$@")
    command+=("--coordinator=127.0.0.1:$at" "--processes=$processes" "--process=$i")
    if [[ -n $dry ]]; then
      printf '%s &\n' "$(quoted "${command[@]}")"
    elif [[ -n $stopping ]]; then
      code=143
    else
      "${command[@]}" </dev/null &
      pids[i]=$!
    fi
  done
  # One may have started while the signal was handled.
  if [[ -n $stopping ]]; then signal TERM; fi
}

# Wait for all processes; their exit code goes to code.
watch() {
  local i status running
  while ((${#pids[@]})); do
    sleep 0.2 || true  # Ctrl-C ends it
    running=$(jobs -rp)
    for i in "${!pids[@]}"; do
      if [[ $'\n'$running$'\n' == *$'\n'${pids[i]}$'\n'* ]]; then continue; fi
      status=0
      wait "${pids[i]}" || status=$?
      unset "pids[i]"
      case $status in
        0) ;;
        75) if ((code == 0)); then code=75; fi ;;
        *)
          if ((code == 0 || code == 75)); then
            code=$status
            say "process $i ended with $code"
            signal KILL
          fi
          ;;
      esac
    done
  done
}

if [[ -n $dry ]]; then
  start "$@"
  exit
fi
trap stop TERM INT HUP
trap 'signal KILL' EXIT
while :; do
  start "$@"
  watch
  case $code in
    0 | 2 | 75) exit "$code" ;;
  esac
  if [[ -n $stopping ]] || ((retries == 0)); then exit "$code"; fi
  retries=$((retries - 1))
  say "starting again; $retries more times"
done
