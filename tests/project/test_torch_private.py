"""torch's private names: each is used in one module only, and still works as expected."""

from __future__ import annotations

import ast
import re
import warnings
from pathlib import Path

import persistent_ops
from persistent_ops.runtime import torch_private

PACKAGE = Path(persistent_ops.__file__).parent
MODULE = PACKAGE / "runtime/torch_private.py"


def dotted(node: ast.AST) -> str:
    """Return "torch._C.name" of an attribute's expression, or "" where it is no chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{before}.{node.attr}" if (before := dotted(node.value)) else ""
    return ""


def private_names(file: Path) -> set[str]:
    """Return the private names of torch that a file uses, imports and getattr() included."""
    tree = ast.parse(file.read_text())
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    origin = {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in imported for alias in node.names}
    names = [*origin.values()]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names.append(dotted(node))
        elif isinstance(node, ast.Call) and dotted(node.func) == "getattr" and isinstance(node.args[1], ast.Constant):
            names.append(f"{dotted(node.args[0])}.{node.args[1].value}")
    for number, name in enumerate(names):
        first, dot, rest = name.partition(".")
        names[number] = f"{origin.get(first, first)}{dot}{rest}"
    found = {name for name in names if name.startswith("torch.") and re.search(r"\._(?!_)", name)}
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


def test_private_names_are_used_in_one_module() -> None:
    used = {str(file.relative_to(PACKAGE)): private_names(file) for file in sorted(PACKAGE.rglob("*.py"))}
    listed = used.pop(str(MODULE.relative_to(PACKAGE)))
    assert "torch._C._get_tracing_state" in listed  # the names are seen
    assert not {file: names for file, names in used.items() if names}


def test_the_list_sees_what_it_is_to_see(tmp_path: Path) -> None:
    file = tmp_path / "uses.py"
    file.write_text(
        "import torch\nimport torch._dynamo\nfrom torch._subclasses import fake_tensor\n"
        "from torch.autograd import Variable as V\nb = V._five.six, torch.__version__, other._seven\n"
        "a = torch._C._one() + torch.cuda._two\nc = getattr(torch._C, '_three', None)\n"
        "self._torch._four = torch.ones(1)\n"
    )
    assert private_names(file) == {
        "torch._dynamo",
        "torch._subclasses.fake_tensor",
        "torch._C._one",
        "torch.cuda._two",
        "torch._C._three",
        "torch.autograd.Variable._five.six",
    }


def test_what_they_answer() -> None:
    """A torch in which a name means something else must be noticed here."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

    tensor = torch.zeros(4)
    storage = tensor.untyped_storage()._cdata
    before = torch_private.storage_use_count(storage)
    views = [tensor[:2], tensor.view(2, 2)]
    assert torch_private.storage_use_count(storage) == before + len(views)
    weak = StorageWeakRef(tensor.untyped_storage())
    found = torch_private.storage_of_weak(weak.cdata)
    assert found is not None and found.data_ptr() == tensor.data_ptr()
    assert torch_private.num_dispatch_modes() == 0 and torch_private.function_transform() is None
    assert torch_private.backward_pass() == -1 and torch_private.autograd_node() is None
    assert torch_private.dual_level() == -1 and not torch_private.is_zero_tensor(tensor)
    assert torch_private.is_zero_tensor(torch._efficientzerotensor(4))
    with torch.autograd.forward_ad.dual_level():
        assert torch_private.dual_level() == 0
    levels = []
    torch.func.jvp(lambda x: levels.append(torch_private.dual_level()) or x, (tensor,), (tensor,))
    assert levels == [0]
    seen = []

    def look(gradient: torch.Tensor) -> None:
        seen.append((torch_private.backward_pass() != -1, torch_private.autograd_node() is not None))

    parameter = torch.ones(2, requires_grad=True)
    product = parameter * 2
    product.register_hook(look)
    product.sum().backward()
    assert seen == [(True, True)]
    compilers = [torch_private.frame_compiler()]
    note = torch.compile(lambda x: compilers.append(torch_private.frame_compiler()), backend="eager")
    with warnings.catch_warnings(action="ignore"):  # torch.compile warns that it cannot trace the question
        note(torch.ones(3).to_sparse())
    assert compilers[0] is None and compilers[1] is not None
    transformed = torch.func.vmap(lambda x: x * (torch_private.function_transform() is not None))(torch.ones(3))
    assert transformed.tolist() == [1.0] * 3
