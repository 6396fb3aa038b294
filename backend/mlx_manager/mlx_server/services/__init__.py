"""One way through a call for every protocol (`inference`, `calls`), and what is kept of calls."""
