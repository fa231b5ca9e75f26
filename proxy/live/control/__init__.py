"""The admin listener's application and the engines that come and go by its orders."""
