#!/usr/bin/env bash
# The batch script of launch/slurm.sh: runs its arguments as one job step.
#
#   sbatch [options] launch/slurm_job.sh COMMAND...
#   sbatch --array=1-N [options] launch/slurm_job.sh --commands=FILE [env NAME=VALUE...]
#
# With --commands the words of a line of FILE follow those that are given: of the line
# whose number SLURM_ARRAY_TASK_ID is, empty ones not counted. A job that stopped and
# saved is queued again. Stands alone: SLURM runs a copy of it.
set -euo pipefail

if [[ $1 == --commands=* ]]; then
  line=$(grep . "${1#*=}" | sed -n "${SLURM_ARRAY_TASK_ID}p")
  shift
  # The line is quoted for a shell; xargs undoes that and expands nothing.
  mapfile -d '' words < <(xargs printf '%s\0' <<<"$line")
  set -- "$@" "${words[@]}"
fi
# A job that is queued again on other nodes takes over the run directory from itself.
if [[ -n ${SLURM_JOB_ID:-} ]]; then export JAXCL_JOB="slurm $SLURM_JOB_ID"; fi
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
  export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun no longer takes it from sbatch
fi

# In the background, or a signal to this script would wait for the end of the step.
# Process 0 works on when the others are done; when one was lost they wait in vain.
srun --kill-on-bad-exit=0 --wait=600 "$@" &
step=$!
trap 'kill -TERM "$step" 2>/dev/null || true' TERM
code=0
wait "$step" || code=$?
while kill -0 "$step" 2>/dev/null; do  # a signal ended the wait, not the step
  code=0
  wait "$step" || code=$?
done

# 143: a signal came before there was anything to save.
if ((code == 75 || code == 143)); then
  # A job that was cancelled is not to come back, and one that SLURM itself takes off
  # its nodes is in other hands.
  state=$(scontrol show job --oneliner "$SLURM_JOB_ID" || true)
  if [[ " $state " == *' JobState=RUNNING '* ]]; then
    echo "jaxcl: stopped with $code; job $SLURM_JOB_ID is queued again" >&2
    scontrol requeue "$SLURM_JOB_ID"
  fi
fi
exit "$code"
