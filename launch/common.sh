# What the launch scripts share. Sourced, not run.
# shellcheck shell=bash

dry=            # --dry-run: print, run nothing
exec 3>&1       # where commands are printed, also within $(...)

# One line that a shell reads as the same words.
quoted() {
  local LC_ALL=C word line='' mark="'\\''"
  for word; do
    if [[ -z $word || $word == *[!A-Za-z0-9_@%+=:,./-]* ]]; then
      word="'${word//\'/"$mark"}'"
    fi
    line+="${line:+ }$word"
  done
  printf '%s\n' "$line"
}

# Run a command, or print it.
run() {
  if [[ -n $dry ]]; then quoted "$@" >&3; else "$@"; fi
}

say() {
  printf 'jaxcl: %s\n' "$1" >&2
}

# The command is wrong: one line, exit code 2.
refuse() {
  say "$1"
  exit 2
}

# NAME VALUE: refuse what is not a number from 0 on; with a third word, from that on.
count() {
  if [[ ! $2 =~ ^[0-9]{1,9}$ ]] || ((10#$2 < ${3:-0})); then
    refuse "$1=$2: must be ${3:-0} or more"
  fi
}

# Refuse a config file that is not here. A name without ".py" is the library's own.
check_config() {
  local word file
  for word; do
    file=${word#--config=} && file=${file%%:*}
    if [[ $word == --config=*.py* && ! -e $file ]]; then
      refuse "--config=$file: there is no such file in $PWD"
    fi
  done
}

# The head of the script that sources this.
usage() {
  awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"
}
