"""The pybind11 module of csrc/bindings.cpp."""

def build_info() -> dict[str, str]: ...
def plan_chunks(
    rows: int,
    hidden: int,
    vocab: int,
    element_size: int = 2,
    need_grad_weight: bool = True,
    exact_accumulation: bool = True,
    memory_budget: int | None = None,
) -> dict[str, int]: ...
