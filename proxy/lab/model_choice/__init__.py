"""Which of several models answers: training and judgement of the choice, in virtual time."""
