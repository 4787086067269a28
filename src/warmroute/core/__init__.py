"""Which node holds which KV block.

Prompts become chains of block hashes in a namespace (`hash_blocks`, `namespace_seed`). `BlockIndex` maps each block to
the holders that hold it. A holder is a number for one cache, for example one data-parallel rank of a node; `CacheView`
knows which node each holder belongs to. The index itself is compiled (`_kernel/index.h`).
"""
