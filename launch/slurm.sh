#!/usr/bin/env bash
# A run on the nodes of a SLURM cluster; it goes on by itself after the time limit.
#
#   launch/slurm.sh [options] -- --config=FILE --workdir=DIR [options of jaxcl.main]
#   launch/slurm.sh [options] --commands=FILE
#
#   --nodes=N        1
#   --gpus=N         of each node; 0
#   --per=WHAT       one process per "node", with all its GPUs, or per "gpu"; node
#   --cpus=N         of each process; what the cluster gives
#   --time=LIMIT     as 24:00:00; what the cluster gives
#   --save=SECONDS   how long before the limit the run is told to save; 300
#   --name=NAME      of the job; jaxcl
#   --log=FILE       %x-%j.out: name and number of the job
#   --sbatch=OPTION  one more option of sbatch, as --sbatch=--account=me; any number
#   --commands=FILE  an array of jobs, one for each line, as launch/sweep.py prints them
#   --dry-run        print the command
#   --help
#
# Submits launch/slurm_job.sh. A run that stopped and saved (exit code 75) is queued
# again: before the time limit, or when another job takes its place. DIR must be on a
# disk that all nodes share. scancel JOB ends it; scancel --signal=TERM JOB saves it and
# queues it again. PYTHON names another python than "python".
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/common.sh
source "$here/common.sh"

nodes=1 gpus=0 per=node cpus='' time='' save=300 name=jaxcl log=%x-%j.out
commands='' python=${PYTHON:-python} more=()
while (($#)); do
  case $1 in
    --nodes=*) nodes=${1#*=} && count --nodes "$nodes" 1 ;;
    --gpus=*) gpus=${1#*=} && count --gpus "$gpus" ;;
    --per=node | --per=gpu) per=${1#*=} ;;
    --cpus=*) cpus=${1#*=} && count --cpus "$cpus" 1 ;;
    --time=*) time=${1#*=} ;;
    --save=*) save=${1#*=} && count --save "$save" 1 ;;
    --name=*) name=${1#*=} ;;
    --log=*) log=${1#*=} ;;
    --sbatch=*) more+=("${1#*=}") ;;
    --commands=*) commands=${1#*=} ;;
    --dry-run) dry=1 ;;
    --help) usage && exit ;;
    --) shift && break ;;
    *) refuse "unknown option $1; options of jaxcl.main stand after --" ;;
  esac
  shift
done

tasks=1
if [[ $per == gpu ]]; then
  ((gpus > 0)) || refuse "--per=gpu: --gpus=N is missing"
  tasks=$gpus
fi
options=("--job-name=$name" "--output=$log" --open-mode=append --requeue)
options+=("--signal=TERM@$save" "--nodes=$nodes" "--ntasks-per-node=$tasks")
if ((gpus > 0)); then options+=("--gpus-per-node=$gpus"); fi
if [[ -n $cpus ]]; then options+=("--cpus-per-task=$cpus"); fi
if [[ -n $time ]]; then options+=("--time=$time"); fi

settings=()
if ((nodes * tasks > 1)); then
  settings=(JAXCL_DISTRIBUTED=1)
  # On SLURM JAX takes one GPU for each process unless it is told otherwise.
  if [[ $per == node ]] && ((gpus > 0)); then
    settings+=("JAX_LOCAL_DEVICE_IDS=$(seq -s, 0 $((gpus - 1)))")
  fi
fi

if [[ -n $commands ]]; then
  if (($#)); then refuse "--commands=$commands: nothing may stand after --"; fi
  [[ -r $commands ]] || refuse "--commands=$commands: there is no such file"
  lines=$(grep -c . "$commands") || refuse "--commands=$commands: has no line"
  commands=$(cd "$(dirname "$commands")" && pwd)/$(basename "$commands")
  options+=("--array=1-$lines")
  job=("--commands=$commands" ${settings[@]+env "${settings[@]}"})
else
  (($#)) || refuse "nothing to run: -- and the options of jaxcl.main are missing"
  check_config "$@"
  job=(${settings[@]+env "${settings[@]}"} "$python" -m jaxcl.main "$@")
fi
run sbatch "${options[@]}" ${more[@]+"${more[@]}"} "$here/slurm_job.sh" "${job[@]}"
