"""Specs and files that name no classifier are refused in our own words."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from patchcleanser import DoubleMasking, PatchCleanserError, Threat, load_classifier
from patchcleanser.classifiers.onnx import OnnxClassifier
from patchcleanser.classifiers.transformers import TransformersClassifier
from patchcleanser.errors import ClassifierError, InputError


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, make_resnet: Callable[[], nn.Module]) -> Path:
    """Weight files and ONNX files, each broken in its own way."""
    folder = tmp_path_factory.mktemp("broken")
    module = make_resnet()
    save_file(module.state_dict(), folder / "good.safetensors")
    torch.save(module.state_dict(), folder / "good.pth")
    content = (folder / "good.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(content[: len(content) // 2])
    (folder / "cut.pth").write_bytes((folder / "good.pth").read_bytes()[:5000])
    (folder / "text.safetensors").write_text("these are no weights")
    (folder / "text.pth").write_text("these are no weights")
    (folder / "empty.pth").touch()
    (folder / "empty.safetensors").touch()
    (folder / "folder.pth").mkdir()
    torch.save([1, 2, 3], folder / "list.pth")
    torch.save({"epoch": 3, "lr": 0.1}, folder / "numbers.pth")
    torch.save(module, folder / "pickled.pth")
    torch.save({k: v for k, v in module.state_dict().items() if "fc" not in k}, folder / "headless.pth")
    (folder / "text.onnx").write_text("this is no model")
    (folder / "empty.onnx").touch()
    (folder / "cut.onnx").write_bytes(b"\x08\x07\x12\x07pytorch")
    (folder / "json.py").touch()
    (folder / "options.py").write_text("def make(width=1): ...")
    (folder / "broken.py").write_text("def make(")
    (folder / "vit").mkdir()
    (folder / "vit" / "config.json").write_text("{}")
    return folder


TIMM = "timm:test_resnet?num_classes=10&weights="
VISION = "torchvision:squeezenet1_1?num_classes=10&weights="

BAD_SPECS = [
    ("banana:resnet50", InputError, "cannot read classifier 'banana:resnet50'; write one of timm:…, torchvision:…"),
    ("resnet50", InputError, r"cannot read classifier 'resnet50'; write one of .*; did you mean timm:resnet50\?$"),
    ("tiny", InputError, r"'tiny'; .*; did you mean zoo:tiny\?$"),
    ("torch-vision:resnet50", InputError, r"'torch-vision:resnet50'; .*; did you mean torchvision\?$"),
    ("model.onnx", InputError, r"'model.onnx'; .*; did you mean onnx:model.onnx\?$"),
    ("{}/vit", InputError, r"vit'; .*; did you mean transformers:.*vit\?$"),
    ("zoo:tinny", ClassifierError, r"no zoo model 'tinny'; there are .*; did you mean tiny\?"),
    ("net:restnet", ClassifierError, r"no network 'restnet'; there are resnet, vit, .*; did you mean resnet\?$"),
    ("torchvision:resnet81", ClassifierError, r"model 'resnet81'; .*; did you mean resnet18\?$"),
    ("timm:", InputError, "cannot read classifier 'timm:'"),
    ("", InputError, "cannot read classifier ''"),
    ("timm:no_such_model", ClassifierError, "timm has no model 'no_such_model'"),
    ("timm:resnet_fifty", ClassifierError, "timm has no model 'resnet_fifty'; near: .*resnet"),
    ("timm:resnet81", ClassifierError, "timm has no model 'resnet81'; near: .*resnet18"),
    (
        "timm:test_resnet.no_such_tag?weights=none",
        ClassifierError,
        "no weights 'no_such_tag' for test_resnet; it has r",
    ),
    ("timm:botnet50ts_256.in1k?weights=none", ClassifierError, "it has no pretrained weights; leave out the tag"),
    ("timm:botnet50ts_256", ClassifierError, "no pretrained weights for botnet50ts_256; give a file with weights=PATH"),
    ("timm:test_resnet?pretrained=false", ClassifierError, "leave it out for the hub's weights, or give a file"),
    (
        "timm:test_resnet?weights=none&banana=1",
        ClassifierError,
        "test_resnet takes no option 'banana'; it has img_size,",
    ),
    (
        "timm:test_vit?weights=none&img_sz=64",
        ClassifierError,
        "test_vit takes no option 'img_sz'; .*; did you mean img_size",
    ),
    (
        "timm:test_resnet?weights=none&num_classes=many",
        ClassifierError,
        "cannot build 'test_resnet' with num_classes=many",
    ),
    ("torchvision:no_such_model", ClassifierError, "torchvision has no classification model 'no_such_model'"),
    ("torchvision:fasterrcnn_resnet50_fpn", ClassifierError, "torchvision has no classification model"),
    (
        "torchvision:squeezenet1_1?weights=none&banana=1",
        ClassifierError,
        "torchvision:squeezenet1_1 takes no option 'banana'; it has num_cl",
    ),
    (f"{TIMM}123", ClassifierError, "no weight file at 123"),
    (f"{TIMM}{{}}/absent.pth", ClassifierError, "no weight file at .*absent.pth"),
    (f"{TIMM}{{}}/folder.pth", ClassifierError, "no weight file at .*folder.pth"),
    (f"{TIMM}{{}}/cut.safetensors", ClassifierError, "cannot read weights from .*cut.safetensors"),
    (f"{TIMM}{{}}/cut.pth", ClassifierError, "cannot read weights from .*cut.pth"),
    (f"{TIMM}{{}}/text.safetensors", ClassifierError, "cannot read weights from .*text.safetensors"),
    (f"{TIMM}{{}}/text.pth", ClassifierError, "cannot read weights from .*text.pth"),
    (f"{TIMM}{{}}/empty.pth", ClassifierError, "cannot read weights from .*empty.pth"),
    (f"{TIMM}{{}}/empty.safetensors", ClassifierError, "cannot read weights from .*empty.safetensors"),
    (
        f"{TIMM}{{}}/pickled.pth",
        ClassifierError,
        "pickled.pth: it is no PyTorch or safetensors file of tensors alone, or is damaged$",
    ),
    (f"{TIMM}{{}}/list.pth", ClassifierError, "list.pth holds no dictionary of tensors"),
    (f"{TIMM}{{}}/numbers.pth", ClassifierError, "numbers.pth holds no dictionary of tensors"),
    (
        f"{TIMM}{{}}/headless.pth",
        ClassifierError,
        r"headless.pth does not fit ResNet: fc\.weight is missing; fc\.bias is missing",
    ),
    (
        "timm:test_vit?num_classes=10&weights={}/good.pth",
        ClassifierError,
        "good.pth does not fit VisionTransformer: .* and [0-9]+ more; check the architecture and the number of classes",
    ),
    (
        "timm:test_resnet?num_classes=7&weights={}/good.safetensors",
        ClassifierError,
        r"fc\.weight is \(10, 96\), wanted \(7, 96\); fc\.bias is \(10,\), wanted \(7,\); check the architecture",
    ),
    (f"{VISION}{{}}/absent.pth", ClassifierError, "no weight file at .*absent.pth"),
    ("timm:resnet18?weigths=none", ClassifierError, "takes no option 'weigths'; .*did you mean weights"),
    ("torchvision:resnet18?weigths=none", ClassifierError, "takes no option 'weigths'; .*did you mean weights"),
    (f"{VISION}{{}}/cut.pth", ClassifierError, "cannot read weights from .*cut.pth"),
    (f"{VISION}{{}}/good.pth", ClassifierError, "good.pth does not fit SqueezeNet"),
    (f"{VISION}IMAGENET1K_V9", ClassifierError, "no weight file at IMAGENET1K_V9"),
    ("onnx:{}/absent.onnx", InputError, "no ONNX file at .*absent.onnx"),
    ("onnx:{}/text.onnx", ClassifierError, "text.onnx is not a model ONNX Runtime can load"),
    ("onnx:{}/empty.onnx", ClassifierError, "empty.onnx is not a model ONNX Runtime can load"),
    ("onnx:{}/cut.onnx", ClassifierError, "cut.onnx is not a model ONNX Runtime can load"),
    ("onnx:{}/text.onnx?maen=0.5", InputError, "text.onnx takes no option 'maen'; it has classes, mean, .* mean mean"),
    ("transformers:{}/vit", ClassifierError, "transformers cannot load .*vit"),
    ("transformers:{}/absent", ClassifierError, "cannot load .*absent': it is neither a folder nor a model of the hub"),
    ("transformers:{}/vit?banana=1", InputError, "vit takes no option 'banana'; it has mean, std, "),
    (
        "best.pt",
        InputError,
        r"'best.pt'; a weight file holds no network: write timm:NAME\?weights=best.pt or .*FUNCTION",
    ),
    ("torch:runs/ts.pt", InputError, r"a weight file holds no network: .*\?weights=runs/ts.pt or .* loads ts.pt$"),
    ("./lit.ckpt?x=1", InputError, r"a weight file holds no network: .*\?weights=lit.ckpt"),
    ("my_models.py", InputError, "'my_models.py'; name the function .* network: python:my_models.py:FUNCTION$"),
    ("zoo:tyni", ClassifierError, r"no zoo model 'tyni'; .*; did you mean tiny\?$"),
    ("python:{}/options.py:make?widht=3", InputError, r"options.py:make takes no option 'widht'; .* mean width\?$"),
    ("python:json", InputError, "write python:module:function or python:FILE.py:function, got python:json"),
    ("python:{}/absent.py:make", ClassifierError, "cannot import python:.*: no file at .*absent.py"),
    ("python:{}/json.py:loads", ClassifierError, "cannot import python:.*: another module is called json; rename"),
    ("python:{}/broken.py:make", ClassifierError, r"cannot import python:.*broken.py:make: SyntaxError: .*line 1\)"),
    ("python:no_such_module:make", ClassifierError, "cannot import python:no_such_module:make"),
    ("python:json:no_such_function", ClassifierError, "python:json:no_such_function: json has no no_such"),
    ("python:json:lods", ClassifierError, r"json has no lods; did you mean loads\?$"),
]


@pytest.mark.parametrize(("spec", "error", "words"), BAD_SPECS)
def test_bad_specs_are_refused(
    spec: str, error: type, words: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(error, match=words) as caught:
        load_classifier(spec.replace("{}", str(files)), device="cpu")
    assert isinstance(caught.value, PatchCleanserError)


@pytest.mark.parametrize("name", ["a+b.pth", "50%25.pth", "a=b.pth"])
def test_file_names_in_a_spec_are_taken_as_they_are(name: str, tmp_path: Path, resnet: nn.Module) -> None:
    torch.save(resnet.state_dict(), tmp_path / name)
    assert load_classifier(f"{TIMM}{tmp_path / name}", device="cpu").classes == 10


@pytest.mark.parametrize("device", ["banana", "cuda:99", "cpu:x", ""])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(InputError, match=f"device '{device}' cannot be used here"):
        load_classifier("timm:test_resnet?weights=none", device=device)


def test_onnx_inputs_of_another_size_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "small.onnx"
    module = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 4)).eval()
    torch.onnx.export(module, (torch.rand(1, 3, 8, 8),), path, dynamo=True, verbose=False)
    with pytest.raises(
        ClassifierError, match=r"small.onnx takes 8×8 px only; for other images add \?resize=8x8 .*, got 16×16$"
    ):
        DoubleMasking(OnnxClassifier(path), Threat.square(4), masks=2).predict(torch.rand(1, 3, 16, 16))


def test_a_transformers_folder_that_is_missing_is_named() -> None:
    with pytest.raises(ClassifierError, match="transformers cannot load '/no/such/folder'"):
        TransformersClassifier("/no/such/folder")


def test_a_module_is_no_spec_and_the_error_says_where_it_goes(resnet: nn.Module) -> None:
    with pytest.raises(
        InputError, match=r"load_classifier takes a string .*, got \w+; .* DoubleMasking\(module, '2%'\)"
    ):
        load_classifier(resnet)  # type: ignore[arg-type]
