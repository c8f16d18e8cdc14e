"""docs/data-path.md runs as it stands, and moves what it says."""

import re
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[2] / "docs" / "data-path.md"


def test_the_documents_code_trains_on_everything_once() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    told: dict[str, Any] = {"__name__": "document"}
    for block in blocks:
        exec(compile(block, str(DOCUMENT), "exec"), told)
    payloads = told["payloads"]
    assert [group.group_id for group in told["held"].groups] == [0, 1, 2, 3]
    assert told["sampled_tokens"] == sum(int(t.sampled_T.sum()) for p in payloads for t in p.trajectories)
    assert told["pulled_bytes"] == sum(payload.size_bytes for payload in payloads) == told["held"].held_bytes
    assert told["unique_images"] == 4
    assert told["cursor"] == {"after_plan": 0}
    assert told["figures"].groups_split == 0
    assert told["unit"].figures()[0] == 0
