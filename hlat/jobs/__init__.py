"""Submissions, attempts and states of scheduler jobs."""
