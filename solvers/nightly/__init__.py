"""The nightly job: from the day's log to a post-training folder that passed its gates, mounted, or to a report."""
