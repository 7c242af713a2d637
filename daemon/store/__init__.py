"""Models on disk: names, catalog, downloads, imports. `Store` is the whole interface; the rest of the daemon imports from here
only.
"""

from daemon.store.fetch import Retries
from daemon.store.manifests import FileRecord, ModelRecord, PullEvent
from daemon.store.store import Store, StoreSettings
from daemon.store.transport import Timeouts

__all__ = ["FileRecord", "ModelRecord", "PullEvent", "Retries", "Store", "StoreSettings", "Timeouts"]
