"""The memory page: a person watches the blocks of a running engine.

From the engine to the eye, one room each::

    changes      what is different in the memory since it was last looked at     engine's thread
    happenings   what one step did: hits, forks, copies, preemptions             engine's thread
    picture      all that has been told so far, for who comes later              event loop
    twin         the same sequences in contiguous regions                        event loop
    history      one sample a second                                             event loop
    message      all of it as bytes                                              event loop
    watch        when that happens, and for whom                                 both
    endpoints    the page, its files, its stream

Nothing is computed while nobody watches. Neither tokens nor text are looked at.
"""
