#!/bin/bash
# One call on the GPU machine: unpack what was carried, work on a table for so many seconds, leave results in $OUT.
#   bash benchmarks/gpu/call.sh [TABLE [SECONDS]]
# SEND="NAME …" names the models to send back; CHECKPOINTS=1 sends the state of unfinished trainings too.
set -u
table=${1:+$(realpath "$1")} end=$((SECONDS + ${2:-540}))
export WORK=${WORK:-$HOME/patchcleanser} FILES=0 MIB=0
mkdir -p "$WORK"/{code,models,rows,logs}
flock -n "$WORK/queue.lock" cp -r src benchmarks "$WORK/code/" # the working tree is replaced at every call
for part in runs/carry*/*/; do
  [ -d "$part" ] || continue
  cp -rn "$part." "$WORK/"
  for file in "$part"models/*/model.safetensors; do # it was sent in an earlier session
    [ -f "$file" ] && touch "$WORK/sent.$(basename "$(dirname "$file")")"
  done
done
cd "$WORK" || exit 1
[ -e sent-rows ] || touch sent-rows
PYTHONPATH=packages python3 -c 'import accelerate, fsspec, pyarrow, timm, torchvision, typer' || exit 1

if [ -n "$table" ]; then
  # In a session of its own the queue goes on between calls; the lock leaves a running one alone.
  setsid flock -n queue.lock xargs -a "$table" -d '\n' -P "${JOBS:-2}" -n 1 \
    bash code/benchmarks/gpu/line.sh > /dev/null 2>&1 < /dev/null &
  sleep 2
fi
while ((SECONDS < end)) && ! flock -n queue.lock true; do sleep 1; done

send() { # NAME PATH…: a tar in parts, if the call's 8 files and 64 MiB leave room
  local name=$1 mib
  shift
  mib=$(($(du -cm "$@" | tail -n 1 | cut -f 1) + 1))
  if ((FILES + mib / 15 + 1 > 8 || MIB + mib > 60)); then
    echo "no room for $name ($mib MiB): it waits for the next call"
    return 1
  fi
  FILES=$((FILES + mib / 15 + 1)) MIB=$((MIB + mib))
  tar -cf - "$@" | split -b 15M -d - "$OUT/$name.tar."
}

for file in models/*/{card.json,metrics.csv}; do # weights may have to wait for another call
  [ -f "$file" ] && cp "$file" "rows/$(basename "$(dirname "$file")").${file##*.}"
done
touch sending
fresh=$(find rows logs -type f -newer sent-rows)
[ -n "$fresh" ] && send rows $fresh && mv sending sent-rows
for folder in models/*/; do
  name=$(basename "$folder")
  [ -f "$folder/card.json" ] && [ ! -f "sent.$name" ] || continue
  [[ " ${SEND:-$name} " == *" $name "* ]] || continue
  send "$name" "models/$name"/{card.json,model.safetensors} && touch "sent.$name"
done
if [ -n "${CHECKPOINTS:-}" ]; then
  for file in $(ls -Sr models/*/checkpoint.pt 2> /dev/null); do send "$(basename "$(dirname "$file")")" "$file"; done
fi
tail -qn 1 logs/*.log 2> /dev/null
flock -n queue.lock echo "the table is finished" || echo "still working"
