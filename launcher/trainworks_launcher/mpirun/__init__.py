"""mpirun's words: its options, and how each version of Open MPI spells them. Pure."""
