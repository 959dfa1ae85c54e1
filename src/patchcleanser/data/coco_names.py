"""The 80 classes of COCO, and the numbers from 1 to 90 under which its annotations name them."""

COCO_CLASSES: tuple[str, ...] = tuple(
    """person,bicycle,car,motorcycle,airplane,bus,train,truck,boat,traffic light,fire hydrant,stop sign,
    parking meter,bench,bird,cat,dog,horse,sheep,cow,elephant,bear,zebra,giraffe,backpack,umbrella,
    handbag,tie,suitcase,frisbee,skis,snowboard,sports ball,kite,baseball bat,baseball glove,skateboard,
    surfboard,tennis racket,bottle,wine glass,cup,fork,knife,spoon,bowl,banana,apple,sandwich,orange,
    broccoli,carrot,hot dog,pizza,donut,cake,chair,couch,potted plant,bed,dining table,toilet,tv,
    laptop,mouse,remote,keyboard,cell phone,microwave,oven,toaster,sink,refrigerator,book,clock,vase,
    scissors,teddy bear,hair drier,toothbrush""".replace("\n    ", "").split(",")
)

UNUSED = {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}
"""Numbers up to 90 that no annotation has."""

COCO_NUMBERS: dict[int, str] = dict(zip([n for n in range(1, 91) if n not in UNUSED], COCO_CLASSES, strict=True))
"""Class names by the number in annotations."""

ALIASES = {
    "aeroplane": "airplane",
    "diningtable": "dining table",
    "motorbike": "motorcycle",
    "pottedplant": "potted plant",
    "sofa": "couch",
    "tvmonitor": "tv",
}
"""Names of Pascal VOC that COCO spells otherwise."""
