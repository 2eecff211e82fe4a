"""Are the intervals right that a result reports of what it chose?"""
