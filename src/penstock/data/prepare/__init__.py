"""Raw text to token shards: as a stream, on all cores, resumable after a kill at any instant."""

from penstock.data.prepare.inputs import DEFAULT_SUFFIXES, Selection
from penstock.data.prepare.plan import PrepareConfig
from penstock.data.prepare.progress import Progress
from penstock.data.prepare.run import Summary, prepare

__all__ = ["DEFAULT_SUFFIXES", "PrepareConfig", "Progress", "Selection", "Summary", "prepare"]
