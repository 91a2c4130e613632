"""Which of all failures is the job's, and the files that say so."""
