"""A scheduler process over made-up prompts: `scheduler_process.py RUN_DIR`."""

import importlib.util
import sys
import threading
from pathlib import Path


def main() -> int:
    spec = importlib.util.spec_from_file_location("model", Path(__file__).with_name("model.py"))
    assert spec is not None
    assert spec.loader is not None
    model = importlib.util.module_from_spec(spec)
    sys.modules["model"] = model
    spec.loader.exec_module(model)

    from knittrans_jax.admission.service import RunFailed, serve

    core = model.make_core(model.make_config(launch__stop_timeout_s=1.0), model.make_prompts({"a": 9}))
    try:
        serve(core, Path(sys.argv[1]), threading.Event())
    except RunFailed as error:
        print(error, file=sys.stderr)
        return 1
    assert not any(name == "jax" or name.startswith("jax.") for name in sys.modules), "the scheduler runs without JAX"
    return 0


if __name__ == "__main__":
    sys.exit(main())
