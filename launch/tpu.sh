#!/usr/bin/env bash
# A run on a TPU VM or a pod slice of them, by gcloud.
#
#   launch/tpu.sh COMMAND NAME [options] [-- --config=FILE [options of jaxcl.main]]
#
#   create   make the TPU NAME, or take it as it is; make it anew if it was preempted
#   install  copy this package to all workers and install it there
#   run      start the run on all workers, in the background, and follow its log
#   logs     follow the log again, of worker 0
#   stop     tell the run to save and stop
#   resume   create, install and run, again and again until the run is finished
#   fetch    copy the run directory to --to
#   delete   delete the TPU
#
#   --zone=ZONE      what gcloud is set to
#   --project=NAME   what gcloud is set to
#   --type=TYPE      accelerator type, as v5litepod-16; for create and resume
#   --version=NAME   runtime version, as v2-alpha-tpuv5-lite; for create and resume
#   --spot           cheaper, may be preempted
#   --queued         wait in the queue for it (a queued resource of the same name)
#   --source=DIR     a checkout of this package; the one that this script is in
#   --to=DIR         for fetch: where to; runs
#   --workdir=DIR    for fetch: the run directory
#   --retries=N      for resume: starts after a failure; 3
#   --poll=SECONDS   between two looks at what is waited for; 30
#   --dry-run        print the commands, as if there was no such TPU; resume: one round
#   --help
#
# Give run and resume --workdir=gs://BUCKET/DIR: all workers write there, and the disks
# of a TPU go with it. Exit code of run, logs and resume: that of jaxcl.main; 75 stopped
# and saved, the same command continues. resume goes on by itself after 75, after a
# preemption and where a worker restarted. Ctrl-C ends the script and not the run.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/common.sh
source "$here/common.sh"

words=() where=() spot=() type='' version='' queued='' source=$(dirname "$here")
to=runs workdir='' retries=3 poll=30
while (($#)); do
  case $1 in
    --zone=* | --project=*) where+=("$1") ;;
    --type=*) type=${1#*=} ;;
    --version=*) version=${1#*=} ;;
    --spot) spot=(--spot) ;;
    --queued) queued=1 ;;
    --source=*) source=${1#*=} ;;
    --to=*) to=${1#*=} ;;
    --workdir=*) workdir=${1#*=} ;;
    --retries=*) retries=${1#*=} && count --retries "$retries" ;;
    --poll=*) poll=${1#*=} && count --poll "$poll" ;;
    --dry-run) dry=1 ;;
    --help) usage && exit ;;
    --) shift && break ;;
    -*) refuse "unknown option $1; options of jaxcl.main stand after --" ;;
    *) words+=("$1") ;;
  esac
  shift
done
((${#words[@]} == 2)) || refuse "want COMMAND NAME, got ${#words[@]} words; see --help"
command=${words[0]} name=${words[1]}
arguments=("$@") ended='' left=$retries

tpu() {
  local verb=$1
  shift
  run gcloud compute tpus tpu-vm "$verb" "$@" ${where[@]+"${where[@]}"}
}

queue() {
  local verb=$1
  shift
  run gcloud compute tpus queued-resources "$verb" "$@" ${where[@]+"${where[@]}"}
}

# WORKERS COMMAND: run it there, by the shell of the workers.
remote() {
  tpu ssh "$name" "--worker=$1" --ssh-flag=-oServerAliveInterval=30 "--command=$2"
}

# State of the TPU, or of its queued resource; ABSENT if there is none.
describe() {
  local kind=$1 field=$2 told problem
  if [[ -n $dry ]]; then
    "$kind" describe "$name" "--format=value($field)"
    echo ABSENT
    return
  fi
  problem=$(mktemp)
  if told=$("$kind" describe "$name" "--format=value($field)" 2>"$problem"); then
    echo "${told:-UNKNOWN}"
  elif grep -q NOT_FOUND "$problem"; then
    echo ABSENT
  else
    cat "$problem" >&2
    rm -f "$problem"
    return 1
  fi
  rm -f "$problem"
}

state() {
  local found
  if [[ -n $queued ]]; then
    found=$(describe queue state.state) || return 1
    if [[ $found != ACTIVE ]]; then
      echo "queue $found"
      return
    fi
  fi
  found=$(describe tpu state) || return 1
  echo "tpu $found"
}

make_it() {
  [[ -n $type && -n $version ]] || refuse "$command: --type or --version is missing"
  if [[ -n $queued ]]; then
    queue create "$name" "--node-id=$name" "--accelerator-type=$type" \
      "--runtime-version=$version" ${spot[@]+"${spot[@]}"}
  else
    tpu create "$name" "--accelerator-type=$type" "--version=$version" \
      ${spot[@]+"${spot[@]}"}
  fi
}

remove() {
  if [[ -n $queued ]]; then
    queue delete "$name" --force --quiet  # --force: its nodes too
  else
    tpu delete "$name" --quiet
  fi
}

# Until the TPU is ready. 1: gcloud failed.
create() {
  local found
  while :; do
    found=$(state) || return 1
    case $found in
      'tpu READY') return ;;
      'tpu ABSENT' | 'queue ABSENT')
        # A queued resource that is active without its TPU is of no use.
        if [[ -n $queued && $found == tpu* ]]; then remove || return 1; fi
        make_it || return 1
        if [[ -n $dry ]]; then return; fi
        ;;
      'tpu STOPPED') tpu start "$name" || return 1 ;;
      'tpu PREEMPTED' | 'tpu TERMINATED' | 'queue SUSPENDED' | 'queue FAILED')
        say "$name is ${found#* }: made anew"
        remove || return 1
        left=$retries
        ;;
      *)
        say "$name is ${found#* }: waiting"
        sleep "$poll"
        ;;
    esac
  done
}

# With uv, for the Python of the machines is older than what the package wants.
install() {
  local folder archive made=''
  # A folder that nobody else can have made, or put another archive into.
  folder=$(if [[ -n $dry ]]; then echo TEMPORARY; else mktemp -d; fi) || return 1
  archive=$folder/jaxcl.tar.gz
  run tar -czf "$archive" -C "$source" --exclude=__pycache__ \
    pyproject.toml README.md LICENSE jaxcl configs &&
    tpu scp "$archive" "$name:jaxcl.tar.gz" --worker=all && made=1
  run rm -rf "$folder"
  [[ -n $made ]] || return 1
  remote all 'set -e
mkdir -p jaxcl && tar -xzf jaxcl.tar.gz -C jaxcl
PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --user --quiet uv
test -x jaxcl-venv/bin/python || ~/.local/bin/uv venv --quiet --python 3.12 jaxcl-venv
~/.local/bin/uv pip install --quiet --python jaxcl-venv/bin/python -e "./jaxcl[tpu]" gcsfs'
}

# Whether a run is alive on a worker. A number alone may be another's after a restart.
# shellcheck disable=SC2016  # for the shell of the worker
alive='grep -qsa jaxcl.main "/proc/$(cat ~/.jaxcl/pid 2>/dev/null)/cmdline"'

# Detached, for ssh starts a command again when its connection breaks.
start() {
  ((${#arguments[@]})) || refuse "$command: -- and the options of jaxcl.main are missing"
  remote all "mkdir -p ~/.jaxcl && cd ~/jaxcl || exit
if $alive; then echo 'the run is there already'; exit; fi
rm -f ~/.jaxcl/code
JAXCL_JOB=tpu-$name JAXCL_DISTRIBUTED=1 setsid nohup bash -c '\"\$@\"; echo \$? >~/.jaxcl/code' run \\
  ~/jaxcl-venv/bin/python -m jaxcl.main $(quoted "${arguments[@]}") \\
  >>~/.jaxcl/log 2>&1 </dev/null &
echo \$! >~/.jaxcl/pid"
}

# LINES: of the past log first.
follow() {
  remote 0 "tail -n $1 --pid=\"\$(cat ~/.jaxcl/pid)\" -F ~/.jaxcl/log"
}

# How the run stands: RUNNING, LOST (it ended and left no code: the machine restarted),
# or the exit code of jaxcl.main, the worst of all workers.
verdict() {
  local told code worst=0
  told=$(remote all "if $alive; then echo jaxcl:RUNNING
else echo jaxcl:\$(cat ~/.jaxcl/code 2>/dev/null || echo LOST); fi") || return 1
  if [[ -n $dry ]]; then return; fi
  told=$(sed -n 's/^jaxcl://p' <<<"$told")
  case $'\n'$told$'\n' in
    $'\n\n') return 1 ;;
    *$'\n'RUNNING$'\n'*) echo RUNNING && return ;;
    *$'\n'LOST$'\n'*) echo LOST && return ;;
  esac
  for code in $told; do
    case $code in
      0) ;;
      75) if ((worst == 0)); then worst=75; fi ;;
      *) if ((worst == 0 || worst == 75)); then worst=$code; fi ;;
    esac
  done
  echo "$worst"
}

# Follow the run until it has ended on all workers; its verdict goes to ended.
wait_for_end() {
  local lines=50
  while :; do
    follow "$lines" || true
    ended=$(verdict) || return 1
    if [[ $ended != RUNNING ]]; then return; fi
    lines=0
    sleep "$poll"
  done
}

finish() {
  wait_for_end || { say "$name does not answer" && exit 1; }
  if [[ -n $dry ]]; then exit; fi
  if [[ $ended == LOST ]]; then say "the run on $name was lost" && exit 1; fi
  exit "$ended"
}

# One round of resume: the TPU, the package, the run. 1: one of them did not work.
round() {
  create && install && start && wait_for_end
}

resume() {
  local found first=1
  if [[ " ${arguments[*]} " != *' --workdir=gs://'* ]]; then
    refuse 'resume: --workdir=gs://BUCKET/DIR is missing; a disk goes with its TPU'
  fi
  [[ -n $type && -n $version ]] || refuse "resume: --type or --version is missing"
  while :; do
    ended=UNREACHABLE
    round || ended=UNREACHABLE
    if [[ -n $dry ]]; then exit; fi
    case $ended in
      0 | 2) exit "$ended" ;;
      75 | 143 | LOST) left=$retries ;;  # 143: there was nothing to save yet
      *)
        # A worker that was preempted makes the others fail, so the TPU comes first.
        found=$(state) || found=''
        if [[ $found == *ABSENT && -n $first ]]; then exit 1; fi
        if [[ -z $found || $found == 'tpu READY' ]]; then
          if ((left == 0)); then
            if [[ $ended == UNREACHABLE ]]; then ended=1; fi
            exit "$ended"
          fi
          left=$((left - 1))
        fi
        ;;
    esac
    first=''
    say "the run on $name ended with $ended; going on"
    sleep "$poll"
  done
}

fetch() {
  [[ -n $workdir ]] || refuse "fetch: --workdir is missing"
  local into
  into=$to/$(basename "$workdir")
  run mkdir -p "$into"
  if [[ $workdir == gs://* ]]; then
    run gcloud storage rsync --recursive "$workdir" "$into"
  else
    # A run directory that is not absolute is where the package is.
    if [[ $workdir != /* ]]; then workdir=jaxcl/$workdir; fi
    tpu scp --recurse "$name:$workdir" "$to" --worker=0
  fi
}

delete() {
  local found gone="tpu ABSENT"
  if [[ -n $queued ]]; then gone="queue ABSENT"; fi
  found=$(state)
  if [[ $found == "$gone" && -z $dry ]]; then
    say "there is no $name"
  else
    remove
  fi
}

case $command in
  create | install | fetch | resume | delete) "$command" ;;
  run) start && finish ;;
  logs) finish ;;
  stop) remote all "$alive && pkill -TERM -P \"\$(cat ~/.jaxcl/pid)\"" ;;
  *) refuse "$command: allowed are create, install, run, logs, stop, resume, fetch, delete" ;;
esac
