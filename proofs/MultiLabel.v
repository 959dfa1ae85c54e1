(** * Multi-label classifiers (core/multilabel.py)

    Each class has a table of decisions of its own, 1 for present and 0 for absent, and double-masking answers each
    class by itself. What is proved of a class at one placement bounds how many answers are right, wherever the patch is. *)

From Coq Require Import List Bool Arith Lia Permutation.
From PatchCleanser Require Import Images Geometry MaskSets Cover RowCertificate DoubleMasking Certificate.
Import ListNotations.

Section MultiLabel.
  Context {pixel value : Type}.
  Variable masks : list (region pixel).
  Variable decisions : nat -> image pixel value -> table label.
  Hypothesis visible : forall c, function_of_visible masks (decisions c).
  Variable majority : list label -> label.
  Variable order : list nat.
  Hypothesis order_has_every_mask : Permutation order (seq 0 (length masks)).

  Definition answer_for (c : nat) (x : image pixel value) : label :=
    answer_of_double_masking masks (decisions c) majority order x.

  (** Some mask that hides the patch has a row that is v throughout. *)
  Definition guaranteed (x : image pixel value) (patch : region pixel) (c : nat) (v : label) : Prop :=
    exists i, i < length masks /\ hides (mask masks i) patch /\ good masks (decisions c) x v i.

  Definition differs_inside (patch : region pixel) (x x' : image pixel value) : Prop :=
    forall p, patch p = false -> x' p = x p.

  (** The row certificate, where the threat is this one placement. *)
  Theorem a_guaranteed_class_keeps_its_answer : forall x patch c v,
    guaranteed x patch c v -> forall x', differs_inside patch x x' -> answer_for c x' = v.
  Proof.
    intros x patch c v Hg x' Hsame. unfold answer_for.
    apply double_masking_keeps_the_label with (R := fun other => other = patch) (x := x); auto.
    - intros other ->. exact Hg.
    - exists patch. split; [reflexivity | exact Hsame].
  Qed.

  Theorem no_class_is_guaranteed_both_ways : forall x patch c v w,
    guaranteed x patch c v -> guaranteed x patch c w -> v = w.
  Proof.
    intros x patch c v w Hv Hw.
    rewrite <- (a_guaranteed_class_keeps_its_answer x patch c v Hv x) by (intro; reflexivity).
    now apply a_guaranteed_class_keeps_its_answer with (patch := patch) (x := x).
  Qed.
End MultiLabel.

(** ** What the program computes from the rows of decisions of each class

    [hiding] says which masks hide a placement. *)

Definition decision (present : bool) : label := if present then 1 else 0.

Definition right (masks : nat) (truth : bool) (rows : list (list label)) (hiding : list bool) : bool :=
  existsb (fun i => entry hiding i && unanimous (decision truth) (nth i rows [])) (seq 0 masks).

(** A class as the program sees it: whether it is a true one, and its rows. *)
Definition class : Type := bool * list (list label).

Definition number {A} (holds : A -> bool) (l : list A) : nat := length (filter holds l).

Definition sure_positives (masks : nat) (classes : list class) (hiding : list bool) : nat :=
  number (fun '(truth, rows) => truth && right masks truth rows hiding) classes.

Definition possible_positives (masks : nat) (classes : list class) (hiding : list bool) : nat :=
  number (fun '(truth, rows) => negb truth && negb (right masks truth rows hiding)) classes.

Definition least (numbers : list nat) : nat :=
  match numbers with [] => 0 | first :: rest => fold_right Nat.min first rest end.

Definition most (numbers : list nat) : nat := fold_right Nat.max 0 numbers.

(** At the worst listed placement: the fewest true positives, and the most false ones. *)
Definition fewest_true (masks : nat) (classes : list class) (placements : list (list bool)) : nat :=
  least (map (sure_positives masks classes) placements).

Definition most_false (masks : nat) (classes : list class) (placements : list (list bool)) : nat :=
  most (map (possible_positives masks classes) placements).

Definition right_everywhere (masks : nat) (placements : list (list bool)) (c : class) : bool :=
  forallb (right masks (fst c) (snd c)) placements.

Lemma more_hold : forall {A B} (f : A -> B) (first : B -> bool) (second : A -> bool) l,
  (forall a, first (f a) = true -> second a = true) -> number first (map f l) <= number second l.
Proof.
  intros A B f first second l H. unfold number. induction l as [|a rest IH]; simpl; [lia|].
  destruct (first (f a)) eqn:E; [rewrite (H a E); simpl; lia | destruct (second a); simpl; lia].
Qed.

Lemma fewer_hold : forall {A B} (f : A -> B) (first : B -> bool) (second : A -> bool) l,
  (forall a, second a = true -> first (f a) = true) -> number second l <= number first (map f l).
Proof.
  intros A B f first second l H. unfold number. induction l as [|a rest IH]; simpl; [lia|].
  destruct (second a) eqn:E; [rewrite (H a E); simpl; lia | destruct (first (f a)); simpl; lia].
Qed.

Lemma least_is_least : forall numbers n, In n numbers -> least numbers <= n.
Proof.
  intros [|first rest] n; [intros []|]. intros H.
  assert (Hall : fold_right Nat.min first rest <= first /\ forall m, In m rest -> fold_right Nat.min first rest <= m).
  { clear H. induction rest as [|a rest [IH IH']]; simpl; [split; [lia | intros m []]|].
    split; [lia|]. intros m [<-|H]; [lia|]. specialize (IH' m H). lia. }
  destruct Hall as [Hfirst Hrest]. destruct H as [<-|H]; auto.
Qed.

Lemma most_is_most : forall numbers n, In n numbers -> n <= most numbers.
Proof.
  intros numbers n. induction numbers as [|a rest IH]; simpl; [intros []|]. intros [<-|H]; [lia|].
  specialize (IH H). lia.
Qed.

Section Counts.
  Variable masks : list (list window).
  Variable shapes : list shape.
  Variable room : window.
  Variable patches : nat.
  Hypothesis shapes_are_positive : forall s, In s shapes -> 1 <= fst s /\ 1 <= snd s.

  Context {value : Type}.
  Variable decisions : nat -> image pixel value -> table label.
  Hypothesis visible : forall c, function_of_visible (regions masks) (decisions c).
  Variable order : list nat.
  Hypothesis order_has_every_mask : Permutation order (seq 0 (length masks)).

  (** The classes that count, and which of them are true. *)
  Variable numbers : list nat.
  Variable truth : nat -> bool.

  Let defended (c : nat) (x : image pixel value) : label :=
    answer_for (regions masks) decisions majority_label order c x.
  Let threat : threat pixel := threat_of_the_program shapes room patches.
  Let placements : list (list bool) := listed_placements masks shapes room patches.
  Let n : nat := length masks.

  Definition class_of (x : image pixel value) (c : nat) : class := (truth c, rows_of masks (decisions c) x).
  Definition classes_of (x : image pixel value) : list class := map (class_of x) numbers.

  Definition true_positives (x : image pixel value) : nat := number (fun c => truth c && (defended c x =? 1)) numbers.
  Definition false_positives (x : image pixel value) : nat :=
    number (fun c => negb (truth c) && (defended c x =? 1)) numbers.

  Lemma a_right_class_keeps_its_answer : forall x patch hiding c,
    (forall i, i < n -> entry hiding i = true -> hides (mask (regions masks) i) patch) ->
    right n (truth c) (rows_of masks (decisions c) x) hiding = true ->
    forall x', differs_inside patch x x' -> defended c x' = decision (truth c).
  Proof.
    intros x patch hiding c Hhides Hright x' Hsame. unfold right in Hright. apply existsb_exists in Hright.
    destruct Hright as [i [Hi H]]. apply in_seq in Hi. apply andb_true_iff in H. destruct H as [Hentry Hrow].
    assert (Hlength : length (regions masks) = n) by apply map_length.
    apply a_guaranteed_class_keeps_its_answer with (x := x) (patch := patch);
      [assumption | now rewrite Hlength | | assumption].
    exists i. rewrite Hlength. split; [lia|]. split; [apply Hhides; [lia | assumption]|].
    apply a_mask_is_good_if_its_row_is; [unfold n in Hi; lia|]. unfold entry, good_masks.
    rewrite nth_indep with (d' := unanimous (decision (truth c)) [])
      by (unfold rows_of; rewrite !map_length, seq_length; unfold n in Hi; lia).
    now rewrite map_nth.
  Qed.

  Theorem a_class_right_everywhere_keeps_its_answer : forall x c,
    right_everywhere n placements (class_of x c) = true ->
    forall x', attacked threat x x' -> defended c x' = decision (truth c).
  Proof.
    intros x c Hright x' [patch [HR Hsame]].
    destruct (a_listed_placement_stands_for_each_patch masks shapes room patches shapes_are_positive patch HR)
      as [hiding [Hin Hhides]].
    unfold right_everywhere in Hright. rewrite forallb_forall in Hright. specialize (Hright hiding Hin).
    now apply a_right_class_keeps_its_answer with (x := x) (patch := patch) (hiding := hiding).
  Qed.

  Theorem the_worst_placement_bounds_true_positives : forall x x', attacked threat x x' ->
    fewest_true n (classes_of x) placements <= true_positives x'.
  Proof.
    intros x x' [patch [HR Hsame]].
    destruct (a_listed_placement_stands_for_each_patch masks shapes room patches shapes_are_positive patch HR)
      as [hiding [Hin Hhides]].
    apply Nat.le_trans with (sure_positives n (classes_of x) hiding); [now apply least_is_least, in_map|].
    apply more_hold. intros c H. apply andb_true_iff in H. destruct H as [Ht Hright].
    rewrite (a_right_class_keeps_its_answer x patch hiding c Hhides Hright x' Hsame), Ht. reflexivity.
  Qed.

  Theorem the_worst_placement_bounds_false_positives : forall x x', attacked threat x x' ->
    false_positives x' <= most_false n (classes_of x) placements.
  Proof.
    intros x x' [patch [HR Hsame]].
    destruct (a_listed_placement_stands_for_each_patch masks shapes room patches shapes_are_positive patch HR)
      as [hiding [Hin Hhides]].
    apply Nat.le_trans with (possible_positives n (classes_of x) hiding); [|now apply most_is_most, in_map].
    apply fewer_hold. intros c H. apply andb_true_iff in H. destruct H as [Ht Hanswer].
    apply andb_true_iff. split; [exact Ht|]. apply negb_true_iff, not_true_iff_false. intro Hright.
    rewrite (a_right_class_keeps_its_answer x patch hiding c Hhides Hright x' Hsame) in Hanswer.
    apply negb_true_iff in Ht. rewrite Ht in Hanswer. discriminate.
  Qed.
End Counts.

(** Precision TP / (TP + FP) is no smaller with more true and fewer false positives; both sides were multiplied out. *)
Theorem precision_is_monotone : forall least most tp fp,
  least <= tp -> fp <= most -> least * (tp + fp) <= tp * (least + most).
Proof. intros. nia. Qed.
