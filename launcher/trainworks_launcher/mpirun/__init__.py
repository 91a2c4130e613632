"""mpirun's command line: its options, and their spelling in each version of Open MPI. Pure."""
