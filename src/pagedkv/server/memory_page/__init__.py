"""The memory page: a person watches the blocks of a running engine.

From the engine to the eye, one room each::

    changes      what is different in the memory since it was last looked at     engine's thread
    happenings   what one step did: hits, forks, copies, preemptions             engine's thread
    twin         the same sequences in contiguous regions                        event loop
    history      the last minutes, one sample a second                           both
    message      all of it as bytes                                              event loop
    watch        when that happens, and for whom                                 both
    endpoints    the page, its files, its stream

While nobody watches nothing is computed but that sample. Neither tokens nor text are looked at.
"""
