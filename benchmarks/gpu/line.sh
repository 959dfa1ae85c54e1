#!/bin/bash
# One line of a table, in $WORK. What is finished is not done again; what was stopped goes on from its checkpoint.
[[ $1 == '#'* || -z $1 ]] && exit
export PYTHONPATH=$PWD/code/src:$PWD/code/benchmarks:$PWD/packages PYTHONUNBUFFERED=1
export PATCHCLEANSER_CACHE=$PWD/data PATCHCLEANSER_MODELS=$PWD/models OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}

make() { # train|harden NAME OPTION…
  [ -f "models/$2/model.safetensors" ] || python3 -m patchcleanser "$1" --out "models/$2" "${@:3}"
}
train() { make train "$@"; }
harden() { make harden "$@"; }
certify() { python3 -m patchcleanser certify --model "trained:models/$1" --out "rows/$1" "${@:2}"; }
price() { python3 -m patchcleanser price --model "trained:models/$1" "${@:2}" --json > "rows/price-$1.json"; }
baselines() { # WEIGHTS DEFENSE…: rows for results/baselines.json, to be put there with --merge
  python3 code/benchmarks/baselines.py "${@:2}" --weights "$1" --models models --runs rows --out "rows/baselines-$1.json"
}
reproduce() { # MODEL TABLE…: what the paper's tables and figures need of a model in models/
  python3 -m patchcleanser reproduce "${@:2}" --models "$1" --precision fast --runs rows/runs --out "rows/reproduce-$1"
}

{ date; echo "$1"; eval "$1"; echo "exit $? after $SECONDS s"; } >> "logs/$(cut -d ' ' -f 2 <<< "$1").log" 2>&1
