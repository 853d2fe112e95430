"""Unique mesh names within this process."""

import itertools

# torch caches results by a mesh's ranks and names; a cached mesh has groups that ended with an earlier job.
numbers = itertools.count()
