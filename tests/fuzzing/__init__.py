"""A fuzzer for the loader: random jobs, run as users run them, against a naive model.

``case.py`` draws a job, ``model.py`` says in plain lists what it must give, ``jobs.py`` runs it. ``make test`` tries some fixed
cases (``tests/property/test_loader.py``), ``make fuzz`` as many as its time allows.
"""
