"""The words that the simulated model generates. Each has at most six letters and is one token."""

_TEXT = """
    the of and to in is it that was for on are as with at this have from or one had by word but not what all
    were we when your can said there use an each which she do how their if will up other about out many then
    them these so some her would make like him into time has look two more write go see number no way could
    people my than first water been call who oil its now find long down day did get come made may part over new
    sound take only little work know place year live me back give most very after thing our just name good man
    think say great where help much before line right too mean old any same tell boy follow came want show also
    around form three small set put end does well large must big even such turn here why ask went men read need
    land home us move try kind hand again change off play spell air away animal house point page letter mother
    answer found study still learn should world high every near add food own below last left few while along
    might close seem next hard open begin life always those both paper got group often run until side feet car
    mile night walk white sea began grow took river four carry state once book hear stop second later miss idea
    enough eat face watch far really almost let above girl cut young talk soon list song being leave family
    cache block token prefix route node engine warm cold
"""

WORDS = tuple(_TEXT.split())
