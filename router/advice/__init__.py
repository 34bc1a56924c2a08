"""Which strategy would serve the recorded traffic best: candidates run in virtual time.

Imports `rollout` and the rooms below it, and `confinement`. Everything that computes runs in
confined processes, whose functions (`worker`) import `simulation` and the models of engines.
"""

from router.advice.advisor import Advisor, Question
from router.advice.candidates import Asked, Candidate

__all__ = ["Advisor", "Asked", "Candidate", "Question"]
