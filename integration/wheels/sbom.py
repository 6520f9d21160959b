"""Writes the wheels' bill of materials, CycloneDX 1.6: software of others that is compiled into them.

    sbom.py OUT.cdx.json

Versions are those of the tools in this environment. Packages that a wheel requires at its installation are in
its metadata. The same sources and tools give the same bytes.
"""

from __future__ import annotations

import json
import re
import sys
import uuid
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

ROOT = Path(__file__).resolve().parents[2]


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise SystemExit(f"sbom: nothing matches {pattern}")
    return match[1]


def libcxx_version() -> str:
    """Returns LLVM's version of the C++ runtime in the ziglang wheel."""
    config = Path(str(distribution("ziglang").locate_file("ziglang/lib/libcxx/include/__config")))
    number = int(found(r"_LIBCPP_VERSION (\d+)", config.read_text()))
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def component(name: str, number: str, licence: str, purl: str, description: str) -> dict[str, Any]:
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": number,
        "description": description,
        "licenses": [{"expression": licence} if " " in licence else {"license": {"id": licence}}],
        "purl": purl,
    }


def bill() -> dict[str, Any]:
    own = found(r'__version__ = "(.+)"', (ROOT / "kv_connector/__init__.py").read_text())
    llvm = libcxx_version()
    llvm_licence = "Apache-2.0 WITH LLVM-exception"
    parts = [
        component(
            name,
            llvm,
            llvm_licence,
            f"pkg:generic/{name}@{llvm}",
            f"{what}, linked in statically, as the ziglang {version('ziglang')} wheel has it",
        )
        for name, what in (
            ("libcxx", "C++ standard library"),
            ("libcxxabi", "C++ runtime"),
            ("libunwind", "stack unwinder"),
            ("compiler-rt", "compiler's runtime"),
        )
    ]
    pybind = version("pybind11")
    parts.append(
        component(
            "pybind11", pybind, "BSD-3-Clause", f"pkg:pypi/pybind11@{pybind}", "bindings, headers compiled in"
        )
    )
    nvcc = version("nvidia-cuda-nvcc")
    parts.append(
        component(
            "nvidia-cuda-nvcc",
            nvcc,
            "LicenseRef-NVIDIA-Proprietary",
            f"pkg:pypi/nvidia-cuda-nvcc@{nvcc}",
            "compiler of the GPU kernels, whose device headers are compiled in",
        )
        | {"licenses": [{"license": {"name": "NVIDIA CUDA Toolkit End User License Agreement"}}]}
    )
    subject = f"pkg:pypi/kv-connector@{own}"
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([subject, parts]))}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": subject,
                "name": "kv-connector",
                "version": own,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "purl": subject,
            }
        },
        "components": parts,
        "dependencies": [
            {"ref": subject, "dependsOn": [part["bom-ref"] for part in parts]},
            *({"ref": part["bom-ref"]} for part in parts),
        ],
    }


def main() -> None:
    text = json.dumps(bill(), indent=2) + "\n"
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if error is not None:
        raise SystemExit(f"sbom: {error}")
    out = Path(sys.argv[1])
    if not out.exists() or out.read_text() != text:
        out.write_text(text)


main()
