"""Names of meshes that no other job of this process has had."""

import itertools

# torch keeps what it has computed for a mesh, and takes one of the same ranks and names for that one, whose groups
# ended with the job that made them.
numbers = itertools.count()
