"""Tables of English words: which carry no content, which are common, and which mean the same.

Small on purpose: a word that is in no table counts as rare.
"""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _groups(text: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(line.split()) for line in text.strip().splitlines())


STOP = _words("""
a about above actually after again all almost along also although always am among an and another any anyone anything
are arent around as at away back be became because become been before being below both but by can cannot cant could
couldnt currently did didnt do does doesnt doing done dont down during each either else enough even ever every
everyone everything exactly few for from further get gets getting go goes going gone got had has hasnt have havent
having he her here hers herself hes him himself his how however hows i id if ill im in indeed instead into is isnt it
its itself ive just kind least less let lets like likely many may maybe me might mine more most much must my myself
neither never no nor not nothing now of off often oh ok okay on once one ones only onto or other others otherwise our
ours ourselves out over own per perhaps quite rather really same shall she should since so some someone something
sometimes somewhere soon still such than that thats the their theirs them themselves then there theres these they
theyre thing things this those though through thus to together too toward towards under until up upon us using very
via was wasnt way ways we well went were werent what whatever whats when whenever where whereas whether which while
who whoever whole whom whos whose why will with within without wont would wouldnt yes yet you youd youll your youre
yours yourself youve
""")
"""Words that carry no content."""

INSTRUCTION = _words("""
accurate add additional adhere again ai aim answer answers appropriate ask asked assist assistant assume based begin
best better bot box boxed brief briefly calculate careful carefully case chain choice choices choose clear clearly
code coding comment comments complete compute concise concisely conclude consider correct correctly create curious
describe detail detailed details determine directly display enclose enclosed end ends ensure enter evaluate exam
exercise experienced expert explain explaining explanation explanations express fenced final finally find first follow
following follows form format formatted function further generate give given giving good great guide hello help
helpful here hey hi highlight homework hoping imagine implement implementation include including indicate input
instruction instructions intermediate it json just keep kindly know last latex learning letter letters line lines list
logic logical make markdown math mathematical mathematician mathematics mention need next note notes number numbered
option options order output pass passed passes pick place please present print problem problems program programmer
programming prompt proof proper properly provide provided providing put python python3 question questions quiz read
reason reasoned reasoning reply request requested required requirements respond responding response result results
return returned returning returns right say script select sentence sentences show showing shown simplified simplify
single skilled snippet solution solutions solve solved solves solving specified specify start state statement step
steps stepwise strictly stuck style suppose sure surround system task teacher tell test tests text thank thanks think
thinking thoroughly thought time try tutor type understand use useful user using valid value want wondering word words
work working wrap wrapped write writing written
""")
"""Words of which instructions about the answer consist; they carry no content either."""

TRIGGERS = _words("""
answer answers assistant below box boxed carefully choice choices exercise explanation following format hello help hey
hi homework input instruction instructions letter option options output problem problems prompt question questions
reason reasoned reasoning reply respond response show solution solutions step steps stepwise task tests thank thanks
think thinking
""")
"""A sentence of instructions has at least one of these."""

OPENERS = _words("please kindly hi hello hey ok okay so now well also")
"""Words before a question that do not belong to it."""

COMMON = _words("""
able accept account across act action activity actual address advice age ago agree air allow alone already amount
angle animal appear apply area arm army array art article available average bad bag ball bank bar base basic beautiful
bed behavior believe benefit big bill bit black blog blue board boat body book born bottom boy break bring brother
brown build building business buy call camera capital car card care carry case cat catch cause cell cent center
central century certain chair chance change character charge check child choose church circle city class clean clear
close clothes cold collect color column come common community company compare compute computer condition contain
continue control convert cook cool copy correct cost count country couple course cover cup customer cut daily dark
data date daughter day dead deal death decide decode deep degree depend design develop dictionary difference different
difficult digit dinner direct distance divide doctor dog dollar door double draw dream dress drink drive drop dry ear
early earn earth east easy eat economy edge education effect egg eight either element email employee empty encode
energy engine enjoy enter equal equation essay even evening event evidence exact example exercise exist expect
experience expression extract eye face fact fall family famous far farm fast father favorite feed feel feet field
fight figure file fill film filter fine finish fire fish five floor fly food foot force foreign forest forget form
found free friend front fruit full function future game garden gas general girl glass goal gold government grade gram
grass greatest green ground group grow guess guest half hall hand happen happy hard hat hate head health hear heart
heat heavy height high history hit hold home hope horse hospital hot hotel hour house huge human hundred hurt husband
ice idea image important improve inch increase index individual industry information input insert inside integer
interest international internet island issue item job join key kid kill kilometer king kitchen knowledge lake land
language large largest late later laugh law lay lead leader learn leave left leg length lesson letter level life lift
light limit line list little live local long longest look lose loss lot love low lunch machine main major man manager
map mark market match material maximum mean measure meat media medical meet meeting member memory mental merge message
meter method middle mile milk million mind minimum minute miss model modern money month morning mother mountain mouth
move movie music name nation national natural nature near necessary negative new news night noise normal north nose
notice number object odd offer office official oil old open operation opinion opportunity order original output
outside page paint pair paper paragraph parent park part partner party pass past path patient pattern pay peace pen
pencil people percent period person phone photo physical pick picture piece place plan plane planet plant plate play
player pocket poem point police policy poor popular population position positive possible post power practice prepare
present president price prime private process produce product program project property protect prove public pull
purpose push quality quick quiet race radius rain raise random range rate reach ready real reason receive recent
recipe record red reduce region relate relation remain remember remove repeat replace report research rest restaurant
reverse rich ride ring rise risk river road rock role roll room root rotate round row rule run safe sale salt same
save scene school science scientist score sea search season seat security see seem sell send sense separate sequence
serve service set seven shape share shirt shoe shop short shortest show side sign similar simple sing sister sit
situation six size skill skin sky sleep slow small smallest smile snow social society soft soil soldier solution solve
son song sort sound source south space speak special speed spend split sport spread spring square staff stage stand
standard star start state station stay stone stop store story strange street string strong structure student study
stuff style subject success sugar suggestion sum summary summer sun support surface surprise swap swim symbol system
table talk tall taste tax teach team technology temperature ten term test thank theory thick thin third thousand three
ticket tie time tip title tool top topic total touch tour town toy trade traditional traffic train training travel
tree triangle trip trouble truck true tuple turn twenty twice two type unit united university usual value variable
various vegetable view village visit voice wait walk wall war warm watch water weather week weekend weight west wheel
white wide width wife win wind window winter wish woman wonder wood word work worker world worry worth write wrong
yard year yellow yesterday young
""")
"""Words that many questions have, in their plain form; half the weight of a rare one."""

NUMBERS = {
    "zero": "0", "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8",
    "nine": "9", "ten": "10", "eleven": "11", "twelve": "12", "thirteen": "13", "fourteen": "14", "fifteen": "15",
    "sixteen": "16", "seventeen": "17", "eighteen": "18", "nineteen": "19",
    "twenty": "20", "thirty": "30", "forty": "40", "fifty": "50", "sixty": "60", "seventy": "70", "eighty": "80",
    "ninety": "90", "hundred": "100", "thousand": "1000", "million": "1000000", "billion": "1000000000",
    "dozen": "12", "twice": "2", "double": "2", "doubled": "2", "doubles": "2", "both": "2", "pair": "2", "triple": "3",
    "thrice": "3", "tripled": "3", "quadruple": "4",
}  # fmt: skip
"""`one` is missing: it is a pronoun more often than a number."""
CJK_STOP = frozenset(
    "的了是在有和与與他她它们們这這那个個我你就也都吗嗎呢吧着著被把对對从從到为為以而且或请請问問のはをがにでともへや이가은는을를의에"
)
"""Letters of Chinese, Japanese and Korean that carry little content by themselves."""
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
DIGITS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

SYNONYMS = _groups("""
buy buys buying bought purchase purchases purchased purchasing
sell sells selling sold
pay pays paid paying payment
cost costs price prices priced
earn earns earned income wage salary make made makes making
spend spends spent spending expense
give gives gave given hand handed donate donated
take takes took taken taking
eat eats ate eaten eating consume consumed consumes
drink drinks drank drunk
run runs ran running jog jogs
go goes went walk walks walked walking stroll
begin begins began begun start starts started starting commence
finish finishes finished end ends ended complete completed completes
leave leaves left remain remains remaining remainder leftover rest
get gets got receive receives received obtain obtains
total totals altogether overall combined sum sums
add adds added addition plus
subtract subtracts subtracted minus subtraction
multiply multiplies multiplied multiplication product products times
divide divides divided division quotient
buddy friend friends pal pals
child children kid kids youngster
man men male guy
woman women female lady
mother mom mum
father dad daddy
person people individual individuals human humans persons folk folks
dollar dollars buck bucks usd
cent cents penny pennies
kilometer kilometers kilometre kilometres km
meter meters metre metres
centimeter centimeters centimetre centimetres cm
kilogram kilograms kg kilos kilo
pound pounds lb lbs
hour hours hr hrs
minute minutes min mins
second seconds sec secs
percent percentage pct percentages
day days daily
week weeks weekly
month months monthly
year years yearly annual annually
big large huge
small little tiny
biggest largest greatest maximum maximal max highest
smallest minimum minimal lowest
longest longer
shortest shorter
fast quick quickly rapid rapidly speedy
slow slowly
car cars automobile vehicle vehicles auto
house houses home homes
store stores shop shops
job jobs occupation career careers profession employment
boss manager supervisor employer
worker workers employee employees staff
company companies firm firms business businesses corporation
city cities town towns
country countries nation nations
road roads street streets
picture pictures image images photo photos photograph photographs
movie movies film films
story stories tale tales
essay essays composition article articles
poem poems verse poetry
letter email emails mail message
summary summarize summarise summarizes summarized recap outline synopsis
difference differences differ differs differentiate distinguish contrast compare compared comparing comparison
benefit benefits advantage advantages pro pros upside upsides
drawback drawbacks disadvantage disadvantages con cons downside downsides
cause causes caused lead leads led reason reasons
effect effects impact impacts consequence consequences influence influences
important importance significant significance crucial key essential vital
example examples instance instances sample samples
tip tips advice suggestion suggestions suggest recommend recommendation recommendations recommended
idea ideas concept concepts notion
way method methods approach approaches technique techniques
improve improves improving improvement enhance enhances boost increase
reduce reduces reducing decrease decreases lower lessen cut
healthy health healthier wellness fit fitness
happy happiness glad
sad unhappy sadness
smart intelligent intelligence clever
list lists array arrays
string strings
number numbers integer integers int ints num nums
element elements item items entry entries member members
character characters char chars
dictionary dictionaries dict dicts hashmap map mapping
check checks checking verify verifies test determine whether
remove removes removed removing delete deletes deleted eliminate drop strip discard
duplicate duplicates duplicated repeated repeat repeats repeating repetition recurring
replace replaces replaced substitute swap
reverse reverses reversed reversing backward backwards
sort sorts sorted sorting ordered order arrange arranged
ascending increasing
descending decreasing
count counts counting tally occurrence occurrences
convert converts converting conversion transform transforms transformed translate
split splits splitting separate separated
join joins joined joining concatenate concatenated concatenation merge merged merges merging combine combines combining
first initial
last final
prime primes
factor factors divisor divisors
common shared share shares
equal equals same identical equivalent
near nearer nearest close closer closest
between among
bigger greater larger exceed exceeds exceeding
smaller fewer
contain contains containing include includes included including have
triangle triangles triangular
square squares squared
root roots zero zeros solution solutions
polynomial polynomials
rectangle rectangles rectangular
circle circles circular
side sides edge edges
vertex vertices corner corners
probability chance chances likelihood odds
random randomly
area areas
length lengths long
width widths wide
height heights tall high
weight weights weigh weighs weighed heavy
distance distances far
speed speeds velocity rate
travel travels traveled travelled travelling trip trips journey
vacation vacations holiday holidays
teacher teachers instructor teach teaches
student students pupil pupils
school schools class classes classroom
book books novel novels
read reads reading
write writes wrote written author authors authored
invent invented inventor invents
discover discovered discovery discoverer discovers
paint painted painter painting paintings
sing sings sang sung singer song songs
build builds built building construct constructed construction
grow grows grew grown growth
fall falls fell fallen
rise rises rose risen
see sees saw seen
speak speaks spoke spoken talk talks
choose chooses chose chosen pick picks picked select selects selected
choice choices selection
think thinks thought
bring brings brought carry carries carried
catch catches caught
steal steals stole stolen
break breaks broke broken
drive drives drove driven
fly flies flew flown flight
find finds found locate
lose loses lost loss
win wins won winner winning victory
know knows knew known
meet meets met meeting
sleep sleeps slept sleeping asleep
foot feet
tooth teeth
mouse mice
knife knives
leaf foliage
life lives
half halves halved
third thirds
quarter quarters fourth
environment environmental
pollution pollute pollutes polluted contamination
climate warming
sea ocean oceans seas
mountain mountains peak
river rivers stream
animal animals creature creatures
plant plants
dog dogs puppy
cat cats kitten
physician doctor doctors
illness disease diseases sickness
customer customers client clients buyer buyers
computer computers pc
program programs software
website websites site webpage
phone phones smartphone smartphones cellphone telephone mobile
game games
plan plans planning schedule schedules itinerary
recipe recipes dish dishes meal meals
cook cooks cooked cooking
save saves saving savings saved
borrow borrows borrowed
fill fills filled
empty empties emptied
open opens opened
old older age ages aged
young younger
new newer
history historical past
famous renowned
popular popularity
main primary chief principal major
capital capitals
population populations inhabitants
president presidents
war wars
define defines definition definitions meaning mean means
describe describes described description
explain explains explained explanation
classify classifies classification categorize categorise category categories
identify identifies identified identification recognize
rewrite rewrites rewritten rephrase rephrased paraphrase reword
edit edits edited correct corrects fix fixes fixed proofread
sentence sentences
paragraph paragraphs
word words
vowel vowels
consonant consonants
uppercase upper capitalized capitalised
palindrome palindromes palindromic
substring substrings
subset subsets
sequence sequences series progression
consecutive successive adjacent
digit digits
sign signs
average averages
profit profits gain
discount discounts discounted
matrix matrices
row rows
column columns
tree trees
node nodes
graph graphs
path paths route routes
stack stacks
queue queues
interview interviews
presentation presentations speech speeches
party parties celebration
birthday birthdays
wedding weddings marriage
bake bakes baked baking baker bakery
apple apples
orchard farm farms farmer farmers
box boxes carton cartons crate crates container
bag bags sack sacks
cup cups mug glass
group groups team teams
afraid scared fear fears feared frightened fearful
color colors colour colours colored coloured
favorite favourite
center centre middle
organize organise organized organised
analyze analyse analysis analyzes analyzing examine examines examination
behavior behaviour
neighbor neighbour neighbors neighbours
die dies died death dead kill kills killed
repair repairs repaired mend
error errors bug bugs exception exceptions failure fail fails
develop develops developed design designs designed devise
funny humorous humor humour joke jokes comic
gift gifts
food foods nutrition diet
money cash
convince convincing persuade persuades persuading persuasive persuasion
polite courteous politely
slogan slogans tagline motto catchphrase
tourist tourists traveler travelers traveller travellers
lawyer attorney lawyers
evening night tonight
debate argue argument arguments argues
opinion opinions view views
feature features characteristic characteristics property properties trait traits
kind kinds type types
similar similarity similarities alike resemble
predict prediction forecast
invest investment investing investments
market marketing
advertise advertisement ad ads advertising
hire hires hired recruit recruiting
apply applies applied application applications
dinner lunch supper
exercise exercises workout workouts
stress stressed anxiety
habit habits routine routines
protect protects protected protection safeguard
prevent prevents prevention avoid avoids
danger dangers dangerous risk risks hazard
clean cleans cleaned cleaning wash washed
conversation dialogue dialog chat
scientist scientists researcher researchers
research study studies
theory hypothesis
law laws rule rules
show shows shown demonstrate prove proof proves
possible feasible
solve solves solved
maximize maximise maximizes maximizing
minimize minimise minimizes minimizing
distinct unique different
exchange exchanges exchanged
shift shifts move moves moved moving
rotate rotates rotated rotation
nested nesting
parse parses parsed parsing
valid validate validates validity
occur occurs occurring appear appears appearing
frequency frequent frequently often
position positions index indices indexes
nth kth
balanced balance
bracket brackets parenthesis parentheses paren parens
whitespace spaces space
pack packs packed package packages packet packets
ticket tickets
pen pens pencil pencils
cookie cookies biscuit biscuits
candy candies sweets
sibling siblings brother brothers sister sisters
daughter son daughters sons
grandma grandmother
grandpa grandfather
spare extra additional
collect collects collected gather gathers gathered
cheap cheaper inexpensive affordable
expensive costly
rent rental lease
fence wall
pool tank
drain drains drained
hike hikes hiked hiking
weekend weekends
morning mornings
afternoon afternoons
""")
"""Words that mean the same in questions, with forms that a stemmer does not reach; the first stands for all."""

CONTRASTS = _groups("""
maximum minimum
largest smallest
longest shortest
ascending descending
first last
even odd
add subtract multiply divide
sum product difference
before after
upper lower
uppercase lowercase
row column
left right
vowel consonant
increase decrease
benefit drawback
area perimeter volume
mean median mode
north south east west
buy sell
hot cold
summer winter
union intersection
prime composite
positive negative
import export
encode decode
encrypt decrypt
push pop
prefix suffix
horizontal vertical
husband wife
cause effect
oldest youngest
inner outer
""")
"""Words of which two questions have one each where they ask for different things."""
