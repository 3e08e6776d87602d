"""Upper limits on what the advisor reads and computes, see `crossdraft.Limit`."""

from crossdraft import Limit

MOST_REPLAYED = Limit(64, "a draft of that length is replayed at every token of every response")
MOST_SEQUENCES = Limit(64, "the work of every token grows with its square")
MOST_REQUESTS = Limit(1_000_000, "each is simulated step by step")
MOST_BYTES = Limit(16, "numbers of a model are not larger")
MOST_DEVICES = Limit(65_536, "models are not spread over more")
METRICS_BYTES = Limit(256 * 2**20, "it is read into memory; keep only the lines about drafts")
EVENT_BYTES = Limit(10 * 2**20, "an event of a stream, and all between two tokens, is kept in memory")
#: Smallest total variation, and share of a score: for smaller ones the numbers of draws and questions overflow.
LEAST_DEVIATION = 1e-9
