# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read what users and monitoring see of a kube-proxy, from a source tree of Kubernetes or from the program itself."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Iterator, NamedTuple, Optional

import yaml


class Gate(NamedTuple):
    """A feature gate: its default, its stage (ALPHA, BETA, or empty for a stable one), and whether it is locked."""

    default: bool
    stage: str = ""
    locked: bool = False


class Metric(NamedTuple):
    """A metric: its type and its labels."""

    type: str
    labels: tuple[str, ...] = ()


class Surface(NamedTuple):
    """What a kube-proxy shows; None for what this kind of source does not show.

    ``gates``: those that it uses, or of a program, those that its help lists: stable ones are not among them.
    ``fields``: of the configuration file, with dots.
    """

    release: str
    gates: dict[str, Gate]
    flags: list[str]
    fields: list[str]
    metrics: Optional[dict[str, Metric]]


#: The files of a tree that define the gates which every component has, beside those that kube-proxy's own code names.
_BASE = "staging/src/k8s.io/component-base"
_COMMON_GATES = (f"{_BASE}/logs/api/v1/kube_features.go", f"{_BASE}/metrics/features/kube_features.go")
_DEFINITIONS = ("pkg/features/kube_features.go", f"{_BASE}/zpages/features/kube_features.go", *_COMMON_GATES)
_CODE = ("cmd/kube-proxy", "pkg/proxy")
_WINDOWS = re.compile(r"_windows|winkernel|Win[A-Z]")
_STAGES = {"Alpha": "ALPHA", "Beta": "BETA", "GA": "", "Deprecated": "DEPRECATED"}
_GROUPS = {"AllAlpha", "AllBeta"}


def _go_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.go")):
        if not path.name.endswith("_test.go") and not _WINDOWS.search(path.name) and "winkernel" not in path.parts:
            yield path


def _release_of(tree: Path) -> str:
    """Return the release of a tree: that of its newest change log."""
    names = [path.stem for path in (tree / "CHANGELOG").glob("CHANGELOG-*.md")]
    found = [re.fullmatch(r"CHANGELOG-(\d+)\.(\d+)", name) for name in names]
    numbers = [(int(match[1]), int(match[2])) for match in found if match is not None]
    if not numbers:
        raise ValueError(f"{tree}: has no change log that shows its release")
    return ".".join(map(str, max(numbers)))


def _gates_of_tree(tree: Path, release: str) -> dict[str, Gate]:
    used: set[str] = set()
    for folder in _CODE:
        for path in _go_files(tree / folder):
            used |= set(re.findall(r"\w*features\.([A-Z]\w+)", path.read_text(encoding="utf-8")))
    found: dict[str, Gate] = {}
    now = tuple(map(int, release.split(".")))
    for definition in _DEFINITIONS:
        text = (tree / definition).read_text(encoding="utf-8")
        for name, versions in re.findall(r"^\t+(?:\w+\.)?(\w+): \{\n((?:\t+\{Version: .*\n)+)", text, re.M):
            own = definition in _COMMON_GATES or name in used or name.startswith(("NFTables", "KubeProxy"))
            # The last specification that this release has reached.
            for line in versions.splitlines() if own and not _WINDOWS.search(name) else ():
                since = re.search(r'MustParse\("(\d+)\.(\d+)"\)', line)
                stage = re.search(r"PreRelease: (?:\w+\.)?(\w+)", line)
                if since is not None and stage is not None and (int(since[1]), int(since[2])) <= now:
                    found[name] = Gate("Default: true" in line, _STAGES[stage[1]], "LockToDefault: true" in line)
    return found


def _flags_of_tree(tree: Path) -> list[str]:
    text = (tree / "cmd/kube-proxy/app/options.go").read_text(encoding="utf-8")
    return sorted(set(re.findall(r'fs\.\w*Var\((?:[^"]|\n)*?"([a-z][a-z0-9-]+)"', text)))


def _fields_of_tree(tree: Path) -> list[str]:
    structs: dict[str, list[tuple[str, str, str]]] = {}
    for path in (
        "kube-proxy/config/v1alpha1/types.go",
        "component-base/config/v1alpha1/types.go",
        "component-base/logs/api/v1/types.go",
    ):
        text = (tree / "staging/src/k8s.io" / path).read_text(encoding="utf-8")
        for name, body in re.findall(r"^type (\w+) struct \{\n(.*?)^\}", text, re.M | re.S):
            structs[name] = re.findall(r"^\t(\w+)\s+(\S+)\s+`json:\"([\w,]*)", body, re.M)

    def walk(name: str, prefix: str) -> Iterator[str]:
        for _field, kind, tag in structs[name]:
            word, inner = tag.split(",")[0], kind.lstrip("*").rpartition(".")[2]
            parts = list(walk(inner, f"{prefix}{word}.")) if inner in structs and not kind.startswith("[]") else []
            yield from parts or ([f"{prefix}{word}"] if word else [])

    return sorted(walk("KubeProxyConfiguration", ""))


def _metrics_of_tree(tree: Path) -> dict[str, Metric]:
    found: dict[str, Metric] = {}
    for path in _go_files(tree / "pkg/proxy/metrics"):
        text = path.read_text(encoding="utf-8")
        options = r"New(\w+?)(?:Vec)?\(\s*&metrics\.\w+Opts\{(.*?)^\t\t\},\s*(?:\[\]string\{([^}]*)\})?"
        for kind, body, labels in re.findall(options, text, re.M | re.S):
            name = re.search(r'Name:\s+"([^"]+)"', body)
            if name is not None:
                found[f"kubeproxy_{name[1]}"] = Metric(kind.lower(), tuple(re.findall(r'"([^"]+)"', labels)))
        described = r'NewDesc\(\s*"(kubeproxy_\w+)",\s*"[^"]*",\s*(?:\[\]string\{([^}]*)\})?'
        for name_, labels in re.findall(described, text):
            found[name_] = Metric("counter", tuple(re.findall(r'"([^"]+)"', labels)))
    return found


def of_tree(tree: Path) -> Surface:
    """Return what the kube-proxy of a source tree of Kubernetes shows. Raises OSError, ValueError."""
    release = _release_of(tree)
    return Surface(
        release, _gates_of_tree(tree, release), _flags_of_tree(tree), _fields_of_tree(tree), _metrics_of_tree(tree)
    )


def _leaves(value: object, prefix: str = "") -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix


def of_binary(program: Path) -> Surface:
    """Return what a program shows without serving anything: its help, and the configuration that it writes.

    Metrics appear only while it runs; :func:`names_in` returns which of known ones it has. Raises OSError,
    subprocess.CalledProcessError.
    """

    def run(*options: str) -> str:
        return subprocess.run([str(program), *options], check=True, capture_output=True, text=True).stdout

    version = re.search(r"v(\d+\.\d+)", run("--version"))
    if version is None:
        raise ValueError(f"{program}: does not show its version")
    text = run("--help")
    gates = {
        name: Gate(default == "true", "" if stage == "GA" else stage)
        for name, stage, default in re.findall(r"(\w+)=true\|false \((\w+) - default=(\w+)\)", text)
        if name not in _GROUPS
    }
    flags = sorted(set(re.findall(r"^\s+(?:-\w, )?--([a-z][a-z0-9-]+)", text, re.M)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        run("--write-config-to", str(path))
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    fields = [name for name in _leaves(document) if name not in ("apiVersion", "kind")]
    return Surface(version[1], gates, flags, sorted(fields), None)


def names_in(program: Path, names: list[str]) -> set[str]:
    """Return which metrics a program has, by the text of their names, which it joins with the prefix when it runs."""
    content = program.read_bytes()
    return {name for name in names if name.partition("_")[2].encode() in content}
