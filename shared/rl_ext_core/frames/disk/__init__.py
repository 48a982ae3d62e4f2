"""A frame store in files: what lies where in its folder, and how it is found again.

Sealed blocks and reference frames go to files at once, and the index with them, as records of a journal that is only
ever appended to: a transition counts once the blocks of all its frames do. The system keeps what was written when a
process is killed, so that nothing has to be forced out to the disk for that. When the machine goes down, what the
system has not written yet is lost, in any order: the checksums of records, blocks, reference frames and rows find that,
and :func:`~rl_ext_core.frames.salvage` keeps the longest run of transitions that is whole.

Blocks are read when they are sampled, and not mapped: what was read from a mapping counts as resident memory. The index
stays in memory, and the row arrays of a store's owner are mapped.

Not to be read again as a whole, a folder is opened by reading its journal and its row arrays, which are small. Blocks
and reference frames are compared with their checksums when they are first read.
"""
