"""/docs: the OpenAPI document as a plain page. It needs no script and nothing from elsewhere."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

Schema = dict[str, Any]


def api_page(document: Schema) -> str:
    """The page as HTML."""
    loader = PackageLoader("patchcleanser.service", "page")
    jinja = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    jinja.filters.update(type=type_of, prose=prose, curl=curl, link=link)
    operations = [
        {"path": path, "method": method, **operation}
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    return jinja.get_template("docs.html.jinja").render(document=document, operations=operations)


def prose(text: str) -> Markup:
    """Text of the document, with `code`."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def type_of(schema: Schema) -> Markup:
    """The type of a value in words; a named one is a link.

    >>> type_of({"anyOf": [{"type": "array", "items": {"$ref": "#/components/schemas/Box"}}, {"type": "null"}]})
    Markup('list of <a href="#Box">Box</a> or null')
    """
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return Markup('<a href="#{0}">{0}</a>').format(name)
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return Markup(" or ").join(map(type_of, options))
    if schema.get("type") == "array":
        return Markup("list of {}").format(type_of(schema["items"]))
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    return Markup(", ").join(map(repr, values)) if values else escape(schema.get("format") or schema.get("type", "any"))


def link(operation: Schema) -> str | None:
    """An address that tries an operation; None if it takes a body."""
    if operation["method"] != "get":
        return None
    required = [parameter for parameter in operation.get("parameters", ()) if parameter["required"]]
    examples = {parameter["name"]: parameter["schema"].get("examples", [0])[0] for parameter in required}
    query = {parameter["name"]: examples[parameter["name"]] for parameter in required if parameter["in"] == "query"}
    address = str(operation["path"]).lstrip("/").format_map(examples)
    return f"{address}?{urlencode(query)}" if query else address


def curl(operation: Schema) -> str | None:
    """A command that sends pictures; None if an operation takes none."""
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if body is None:
        return None
    fields = [f"-F {name}={value[0]}" for name, value in body["example"].items() if name != "images"]
    return " ".join(["curl -F image=@photo.png", *fields, f"http://127.0.0.1:8000{operation['path']}"])
