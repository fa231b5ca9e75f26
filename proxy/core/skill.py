"""How far predictions of single requests come true, measured on those that leave.

A prediction is a request's deviation from the mean request, and so is its outcome. The best linear
use of the prediction is its regression slope: 1 if it is calibrated, less if it exaggerates, 0 or
below if it tells nothing. A predictor that says the same of all requests has no slope; a little of the
outcomes' variance, added to that of the predictions, makes it 0 then.
"""

# Latest requests that the slope is of, and how many without any skill are taken to be before them.
_WEIGHT = 1 / 256
_DOUBTED = 16
# A predictor that explains this share of the variance is followed half the way.
_MARGIN = 0.05


class Skill:
    """The slope of outcome on prediction.

    Attributes:
        share: How much of a prediction to believe, 0 to 1.
    """

    def __init__(self) -> None:
        self.share = 0.0
        self._count = 0
        # Running means: prediction, outcome, and their second moments.
        self._means = [0.0] * 5

    def learn(self, predicted: float, outcome: float) -> None:
        """Compare one request's prediction with what it did."""
        self._count += 1
        weight = max(1 / self._count, _WEIGHT)
        latest = (predicted, outcome, predicted**2, outcome**2, predicted * outcome)
        self._means = [
            mean + weight * (value - mean) for mean, value in zip(self._means, latest, strict=True)
        ]
        x, y, xx, yy, xy = self._means
        spread = (xx - x * x) + _MARGIN * (yy - y * y)
        slope = (xy - x * y) / spread if spread > 0.0 else 0.0
        self.share = min(max(slope, 0.0), 1.0) * self._count / (self._count + _DOUBTED)
