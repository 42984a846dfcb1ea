"""Importers of recorded agent runs: what a format's files say (`*_files`), and the tasks they make."""
