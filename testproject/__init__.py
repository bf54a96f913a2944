"""Project that shows and exercises angee_jobs; not part of the distribution."""
