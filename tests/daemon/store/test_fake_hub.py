"""The fake hub speaks the real API: huggingface_hub's own client pulls from it, and our lookup finds what it cached."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from daemon.store import Store
from tests.fixtures.fake_hub import FakeHub


def test_real_client(hub: FakeHub, make_store: Callable[..., Store], folder_files: dict[str, bytes], tmp_path: Path) -> None:
    from huggingface_hub import HfApi, snapshot_download

    hub.add("Tiny/Llama", folder_files)
    info = HfApi(endpoint=hub.endpoint, token=False).model_info("Tiny/Llama", files_metadata=True)
    sizes = {sibling.rfilename: sibling.size for sibling in info.siblings or []}
    assert sizes == {name: len(data) for name, data in folder_files.items()} and info.sha == hub.repos["Tiny/Llama"].commit
    snapshot = snapshot_download("Tiny/Llama", endpoint=hub.endpoint, cache_dir=tmp_path / "hf" / "hub", token=False)
    assert {path.name: path.read_bytes() for path in Path(snapshot).iterdir()} == folder_files
    hub.log.clear()
    store = make_store(hub)
    asyncio.run(store.pull("hf.co/Tiny/Llama", lambda _: None))
    assert hub.sent() == 0
